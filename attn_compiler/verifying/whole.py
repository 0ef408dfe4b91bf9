"""A run of the model's whole own graph on copies of the real inputs: outputs, writes to inputs, and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_compiler.reporting.verifications import Verification
from attn_compiler.spec.dtypes import HALVES
from attn_compiler.spec.numerics import FACTOR, FLOOR_ULPS
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing
from attn_compiler.verifying import interpreting, outputs
from attn_compiler.verifying.comparing import Compared, Rule, Words
from attn_compiler.verifying.copies import is_trained_parameter, isolated, leaving_no_trace, share_memory
from attn_compiler.verifying.interpreting import AS_IT_IS, Arithmetic, Autocast, Record
from attn_compiler.verifying.numbers import Noise, fused_noise
from attn_compiler.verifying.plan import CheckPlan


@dataclass(frozen=True, kw_only=True)
class Called:
    """The inputs of one call as they were. args: copies, but for trained parameters that the graph does not write to. versions: of those
    parameters. trained: True for inputs that need a gradient. autocast: of the call."""

    plan: CheckPlan
    args: Sequence[Any]
    trained: Sequence[bool]
    versions: Sequence[Fingerprint | None]
    autocast: Autocast

    @staticmethod
    def copied(plan: CheckPlan, args: Sequence[Any]) -> Called:
        """Copy the inputs."""
        shared = [is_trained_parameter(x) and not may_write for x, may_write in zip(args, plan.may_write, strict=True)]
        with torch.no_grad():
            copies = isolated(args, shared)
        return Called(
            plan=plan,
            args=copies,
            trained=[isinstance(x, torch.Tensor) and x.requires_grad for x in args],
            versions=[fingerprint(x) if keep else None for x, keep in zip(copies, shared, strict=True)],
            autocast=Autocast.current(plan.devices),
        )

    def apart(self, ran: Ran) -> str | None:
        """Return why the compiled graph may rightly differ, if it may."""
        if self.plan.communicates:
            return "the graph communicates, and other processes may not run it as often"
        if ran.random:
            return "the graph draws random numbers, others in every compiler"
        if share_memory(self.args, self.plan.may_write):
            return "inputs that share memory are written to"
        return None

    @property
    def changed(self) -> list[int]:
        """Parameters whose contents changed since."""
        pairs = enumerate(zip(self.args, self.versions, strict=True))
        return [i for i, (x, version) in pairs if version is not None and fingerprint(x) != version]


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
class Ran:
    """outs: the graph's outputs. inputs: as it left them. random: it drew random numbers. gradients: of the inputs."""

    outs: Sequence[Any]
    inputs: Sequence[Any]
    random: bool
    gradients: Sequence[torch.Tensor | None] = ()


@dataclass(frozen=True, kw_only=True)
class SeenBackward:
    """The backward of a call, for results by place: the graph's outputs, then its inputs as it left them. arrived: their gradients.
    written: their contents at the beginning of the backward, if the caller had written to them."""

    arrived: Mapping[int, torch.Tensor]
    written: Mapping[int, torch.Tensor] = field(default_factory=dict)


def run_model(
    called: Called,
    arithmetic: Arithmetic = AS_IT_IS,
    *,
    backward: SeenBackward | None = None,
    record: Record | None = None,
) -> Ran:
    """Run the model's own graph. backward: of the call, if its gradients are wanted."""
    plan = called.plan
    with leaving_no_trace(called.args, plan.devices, gradients=backward is not None) as drawn:
        # The caller's writes are repeated below: into copies, since all runs share the inputs.
        is_written = backward is not None and bool(backward.written)
        copies = isolated(called.args, [not (may_write or is_written) for may_write in plan.may_write])
        values = [arithmetic.number(x) for x in copies]
        leaves: dict[int, torch.Tensor] = {}
        if backward is not None:
            for i in (i for i, trained in enumerate(called.trained) if trained):
                leaves[i] = values[i].detach().requires_grad_()
                values[i] = _entered(leaves[i], values[i]) if plan.may_write[i] else leaves[i]
        with called.autocast.enter(none=arithmetic.dtype is not None):
            outs = interpreting.interpret(plan.module, values, arithmetic, record)
        with fused_noise(arithmetic.noise, plan.rounded):
            gradients = _gradients([*outs, *values], backward, leaves, len(values)) if backward is not None else ()
        return Ran(outs=outs, inputs=values, random=drawn.any, gradients=gradients)


def overwrites_saved(called: Called, backward: SeenBackward) -> bool:
    """Return True if the model's own backward reads a tensor written since autograd saved it, through `.data` or `detach()`.

    Autograd does not see such a write. The gradients are then those of no function, and differ from kernel to kernel, by the tensors each
    saves.
    """
    found: list[bool] = []

    def saved(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.detach().clone()

    def read(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        now, then = both
        found.append(not torch.equal(now.detach().nan_to_num(), then.nan_to_num()))
        return now

    with torch.autograd.graph.saved_tensors_hooks(saved, read):
        run_model(called, backward=backward)
    return any(found)


def _entered(leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    entered: torch.Tensor = _Written.apply(leaf, [value])  # type: ignore[no-untyped-call]
    return entered


class _Written(torch.autograd.Function):
    """A leaf that may be written to in place: gradients are with respect to its earlier contents."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: list[torch.Tensor]) -> torch.Tensor:
        return value[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _gradients(
    results: Sequence[Any], backward: SeenBackward, leaves: Mapping[int, torch.Tensor], count: int
) -> list[torch.Tensor | None]:
    for i, x in backward.written.items():
        # Like the caller, unseen by autograd: saved tensors are written, too.
        results[i].data.copy_(x)
    known = [(results[i], gradient) for i, gradient in backward.arrived.items() if results[i].requires_grad]
    found: list[torch.Tensor | None] = [None] * count
    if known and leaves:
        outs, gradients = zip(*known, strict=True)
        wide = [g.to(out.dtype) for out, g in zip(outs, gradients, strict=True)]
        made = torch.autograd.grad(outs, list(leaves.values()), wide, allow_unused=True)
        for i, gradient in zip(leaves, made, strict=True):
            found[i] = gradient
    return found


def rerun(called: Called, noise: Noise | None, backward: SeenBackward | None = None) -> Sequence[Any]:
    """Return results of the model's own graph in wider numbers, with noise on each step if any; its gradients, given `backward`."""
    ran = run_model(called, Arithmetic(dtype=_wide(called), noise=noise), backward=backward)
    return ran.gradients if backward is not None else results(called.plan, ran.outs, ran.inputs)


def _wide(called: Called) -> torch.dtype:
    """Return a dtype twice as wide as the results': float32 only if all differentiated tensors are in half precision."""
    floats = [x for x in called.args if isinstance(x, torch.Tensor) and x.dtype in FLOOR_ULPS]
    trained = [x for x, is_trained in zip(called.args, called.trained, strict=True) if is_trained]
    return torch.float32 if all(x.dtype in HALVES for x in trained or floats) else torch.float64


def verification(
    plan: CheckPlan, subject: str, compared: Compared | None = None, *, skipped: str | None = None
) -> Verification:
    """Return a result of the whole graph."""
    found = Verification(graph=plan.graph, module=f"graph {plan.graph}", subject=subject, skipped=skipped)
    if compared is None:
        return found
    return dataclasses.replace(found, elements=compared.elements, error=compared.error, allowed=compared.allowed)


def words(plan: CheckPlan, names: Callable[[], Sequence[str]]) -> Words:
    """Return the words of the whole graph. names: of all results."""
    sites = ", ".join(check.site.module for check in plan.checks if check.subject == "output")
    formula = (f"attention at {sites}" if sites else "linear attention") if plan.padded is None else "real tokens alone"
    return Words(names=names, site=f"graph {plan.graph}", formula=formula)


def rule(plan: CheckPlan, beside: Sequence[torch.Tensor] = ()) -> Rule:
    """Return the rule of the site that allows for most."""
    factor = max((outputs.factor(check.site) for check in plan.checks), default=FACTOR)
    return Rule(factor=factor, rounded=plan.rounded, beside=beside)


def results(plan: CheckPlan, outs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return a graph's outputs, then the inputs that it may write to."""
    if plan.padded is not None:
        outs = list(plan.padded.cleared(dict(enumerate(outs)), inputs).values())
    return [*outs, *(x for x, may_write in zip(inputs, plan.may_write, strict=True) if may_write)]
