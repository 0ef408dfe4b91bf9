"""A run of the model's whole own graph on copies of the real inputs: outputs, writes to inputs, and gradients, and their comparison.

The model's own graph gets the gradients that arrived at the compiled graph's outputs. The comparison also detects a tensor that the
backward read after somebody had written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting.verifications import Verification
from attn_compiler.spec.dtypes import HALVES
from attn_compiler.spec.numerics import FACTOR, FLOOR_ULPS
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing
from attn_compiler.verifying import comparing, interpreting
from attn_compiler.verifying.comparing import Compared, Rule
from attn_compiler.verifying.interpreting import Arithmetic, Noise, Record
from attn_compiler.verifying.plan import CheckPlan
from attn_compiler.verifying.watching import Arrived

SUBJECT_OUTPUTS, SUBJECT_GRADIENTS = "graph outputs", "graph gradients"

Fingerprint = tuple[str, ...]


def fingerprint(x: torch.Tensor) -> Fingerprint:
    """Return a fingerprint that changes with writes to a tensor, through any alias."""
    if torch_compat.is_wrapper_subclass(x):
        # Writes to a wrapper change its inner tensors.
        return tuple(number for part in torch_tracing.plain_tensors(x) for number in fingerprint(part))
    if x.layout != torch.strided or not x.numel():
        return ()
    with torch.no_grad():
        flat = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).detach().reshape(-1).double()
        weights = torch.arange(1, flat.numel() + 1, device=x.device) % 8191
        return tuple(repr(float(y)) for y in (flat.sum(), flat.abs().sum(), flat.dot(weights.double())))


@dataclass(frozen=True, kw_only=True)
class Called:
    """The inputs of one call as they were. args: copies, but for trained parameters that the graph does not write to. versions: of those
    parameters. trained: True for inputs that need a gradient. autocast: of the call."""

    plan: CheckPlan
    args: Sequence[Any]
    trained: Sequence[bool]
    versions: Sequence[Fingerprint | None]
    autocast: Callable[[bool], AbstractContextManager[Any]]

    @staticmethod
    def copied(plan: CheckPlan, args: Sequence[Any]) -> Called:
        """Copy the inputs."""
        # Autograd itself would refuse most writes to a trained parameter.
        trained = [isinstance(x, nn.Parameter) and x.requires_grad for x in args]
        shared = [is_trained and not may_write for is_trained, may_write in zip(trained, plan.may_write, strict=True)]
        with torch.no_grad():
            copies = interpreting.isolated(args, shared)
        return Called(
            plan=plan,
            args=copies,
            trained=[isinstance(x, torch.Tensor) and x.requires_grad for x in args],
            versions=[fingerprint(x) if keep else None for x, keep in zip(copies, shared, strict=True)],
            autocast=interpreting.current_autocast(plan.devices),
        )

    def apart(self, ran: Ran) -> str | None:
        """Return why the compiled graph may rightly differ, if it may."""
        if self.plan.communicates:
            return "the graph communicates, and other processes may not run it as often"
        if ran.random:
            return "the graph draws random numbers, others in every compiler"
        if interpreting.share_memory(self.args, self.plan.may_write):
            return "inputs that share memory are written to"
        return None

    @property
    def changed(self) -> list[int]:
        """Parameters whose contents changed since."""
        pairs = enumerate(zip(self.args, self.versions, strict=True))
        return [i for i, (x, version) in pairs if version is not None and fingerprint(x) != version]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """outs: the graph's outputs. inputs: as it left them. random: it drew random numbers. gradients: of the inputs."""

    outs: Sequence[Any]
    inputs: Sequence[Any]
    random: bool
    gradients: Sequence[torch.Tensor | None] = ()


def run_model(
    called: Called,
    arithmetic: Arithmetic | None = None,
    *,
    backward: Arrived | None = None,
    record: Record | None = None,
) -> Ran:
    """Run the model's own graph. backward: the call's, as seen, if the gradients are wanted."""
    plan, arithmetic = called.plan, arithmetic or Arithmetic()
    with interpreting.leaving_no_trace(called.args, plan.devices, gradients=backward is not None) as drew:
        # The caller's writes are repeated below: into copies, since all runs share the inputs.
        is_written = backward is not None and bool(backward.written)
        copies = interpreting.isolated(called.args, [not (may_write or is_written) for may_write in plan.may_write])
        values = [arithmetic.number(x) for x in copies]
        leaves: dict[int, torch.Tensor] = {}
        for i in (i for i, trained in enumerate(called.trained) if trained and backward is not None):
            leaves[i] = values[i].detach().requires_grad_()
            values[i] = _Written.apply(leaves[i], [values[i]]) if plan.may_write[i] else leaves[i]  # type: ignore[no-untyped-call]
        with called.autocast(arithmetic.dtype is None):
            outs = interpreting.interpret(plan.module, values, arithmetic, record)
        found: dict[int, torch.Tensor | None] = {}
        if backward is not None:
            made = [*outs, *values]
            for i, x in backward.written.items():
                # Like the caller, unseen by autograd: saved tensors are written, too.
                made[i].data.copy_(x)
            known = [(made[i], x.to(made[i].dtype)) for i, x in backward.outputs.items() if made[i].requires_grad]
            if known and leaves:
                to, upstream = zip(*known, strict=True)
                with interpreting.fused_noise(arithmetic.noise, plan.rounded):
                    of_leaves = torch.autograd.grad(to, list(leaves.values()), upstream, allow_unused=True)
                found = dict(zip(leaves, of_leaves, strict=True))
        gradients = [found.get(i) for i in range(len(values))]
        return Ran(outs=outs, inputs=values, random=drew(), gradients=gradients)


class _Written(torch.autograd.Function):
    """A leaf that may be written to in place: gradients are with respect to its earlier contents."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: list[torch.Tensor]) -> torch.Tensor:
        return value[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def overwrites_saved(called: Called, backward: Arrived) -> bool:
    """Return True if the model's own backward reads a tensor written since autograd saved it, through `.data` or `detach()`.

    Autograd does not see such a write. The gradients are then those of no function, and differ from kernel to kernel, by the tensors each
    saves.
    """
    found: list[bool] = []

    def read(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        now, then = both
        found.append(not torch.equal(now.detach().nan_to_num(), then.nan_to_num()))
        return now

    with torch.autograd.graph.saved_tensors_hooks(lambda x: (x, x.detach().clone()), read):
        run_model(called, backward=backward)
    return any(found)


def rerun(called: Called, noise: Noise | None, backward: Arrived | None = None) -> Sequence[Any]:
    """Return results of the model's own graph in wider numbers, with noise on each step if any; its gradients, given `backward`.

    The dtype is twice as wide as the results': float32 only if all differentiated tensors are in half precision.
    """
    floats = [x for x in called.args if isinstance(x, torch.Tensor) and x.dtype in FLOOR_ULPS]
    trained = [x for x, is_trained in zip(called.args, called.trained, strict=True) if is_trained]
    dtype = torch.float32 if all(x.dtype in HALVES for x in trained or floats) else torch.float64
    ran = run_model(called, Arithmetic(dtype=dtype, noise=noise), backward=backward)
    return ran.gradients if backward is not None else results(called.plan, ran.outs, ran.inputs)


def results(plan: CheckPlan, outs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return a graph's outputs, then the inputs that it may write to."""
    if plan.padded is not None:
        outs = list(plan.padded.cleared(dict(enumerate(outs)), inputs).values())
    return [*outs, *(x for x, may_write in zip(inputs, plan.may_write, strict=True) if may_write)]


# ---- comparison with what the compiled graph gave -------------------------------------------------------------------


def said(
    plan: CheckPlan, subject: str, compared: Compared | None = None, *, skipped: str | None = None
) -> Verification:
    """Return a result of the whole graph."""
    found = compared or Compared(elements=0)
    return found.said(graph=plan.graph, module=f"graph {plan.graph}", subject=subject, skipped=skipped)


def _rule(plan: CheckPlan, names: Sequence[str], beside: Sequence[torch.Tensor] = ()) -> Rule:
    """Return the rule of the site that allows for most. names: of all results."""
    sites = ", ".join(check.site.module for check in plan.outputs())
    formula = (f"attention at {sites}" if sites else "linear attention") if plan.padded is None else "real tokens alone"
    factor = max((check.factor for check in plan.outputs()), default=FACTOR)
    site = f"graph {plan.graph}"
    return Rule(names=names, site=site, formula=formula, factor=factor, rounded=plan.rounded, beside=beside)


def check_outputs(
    called: Called, ran: Ran, outs: Sequence[Any], args: Sequence[Any], apart: str | None
) -> Verification:
    """Compare what the compiled graph returned and left in its inputs. Raises VerificationMismatch. apart: why they may rightly differ."""
    plan = called.plan
    if apart is not None:
        return said(plan, SUBJECT_OUTPUTS, skipped=apart)
    left = [
        f"{name} as the graph left it" for name, written in zip(plan.inputs, plan.may_write, strict=True) if written
    ]
    names = [*(f"output {i} of the graph" for i in range(len(outs))), *left]
    new, own = results(plan, outs, args), results(plan, ran.outs, ran.inputs)
    compared = comparing.compare(new, own, lambda noise: rerun(called, noise), _rule(plan, names))
    return said(plan, SUBJECT_OUTPUTS, compared)


def check_gradients(called: Called, arrived: Arrived, apart: str | None) -> Verification:
    """Compare the gradients of one backward. Raises VerificationMismatch. apart: why they may rightly differ, if they may."""
    plan, wanted = called.plan, list(arrived.inputs)
    if called.changed:
        apart = f"written to between forward and backward: {', '.join(plan.inputs[i] for i in called.changed)}"
    if apart is not None:
        return said(plan, SUBJECT_GRADIENTS, skipped=apart)
    backward = arrived
    if plan.padded is not None:
        backward = replace(arrived, outputs=plan.padded.cleared(arrived.outputs, called.args))

    def run(noise: Noise | None) -> list[torch.Tensor | None]:
        made = rerun(called, noise, backward)
        return [made[i] for i in wanted]

    ran = run_model(called, backward=backward)
    new, own = [arrived.inputs[i] for i in wanted], [ran.gradients[i] for i in wanted]
    rule = _rule(plan, [f"gradient of {plan.inputs[i]}" for i in wanted], list(arrived.outputs.values()))
    try:
        return said(plan, SUBJECT_GRADIENTS, comparing.compare(new, own, run, rule))
    except VerificationMismatch:
        if not overwrites_saved(called, backward):
            raise
        why = "the model writes, through .data or detach(), to what autograd saved for the backward"
        return said(plan, SUBJECT_GRADIENTS, skipped=why)
