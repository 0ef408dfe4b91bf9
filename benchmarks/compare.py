"""Our backend beside Inductor's own on one model and one set of inputs: times, ratio, numeric error, and what was chosen."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import attn_compiler
from attn_compiler.reporting.report import Report
from benchmarks import harness
from benchmarks.harness import BACKEND, BASELINE, Step

# What float32 disagrees with itself by, between two orders of summation, over the depth of a model.
ROUNDING_NOISE = 2e-5
# `numerics` where the reference did not fit into the device's memory.
NO_MEMORY = "not checked, no memory"

COLUMNS = (
    "sites", "misses", "lowerings", "rounds",
    *(f"{side}_{p}_ms" for side in (BASELINE, BACKEND) for p in ("p20", "p50", "p80")), "ratio", "error",
    "error_eager", "numerics",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model in its own dtype and the inputs of one call.

    baseline: what Inductor compiles, the same model with another attention implementation (None: the same object).
    plain: what runs uncompiled, and in float32, likewise (None: the same object).
    valid: bool (batch, seqlen), the output positions that mean something (None: all); padding's own output is nobody's.
    softcap: scores go through tanh, where the numeric rule allows 3 times the error instead of 2.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    baseline: nn.Module | None = None
    plain: nn.Module | None = None
    device: str = "cpu"
    training: bool = False
    valid: torch.Tensor | None = None
    softcap: bool = False

    def step(self, model: nn.Module, inputs: Mapping[str, Any] | None = None) -> Step:
        """Calls of a model. inputs: others than the case's."""
        return harness.make_step(model, inputs or self.inputs, training=self.training, valid=self.valid)


def compile_both(case: Case, options: Mapping[str, Any] | None = None) -> dict[str, Step]:
    """A step for Inductor and one for us, each compiled by its first call. Forgets what Dynamo compiled before. options: for our side.

    For these very sizes: with Dynamo's automatic choice, sizes that code shared by several layers saw while the first side was compiled
    would become symbolic for the second side alone.
    """
    torch.compiler.reset()
    attn_compiler.reset()
    steps = {}
    sides = {BASELINE: (case.baseline or case.model, None), BACKEND: (case.model, options and dict(options))}
    for name, (module, further) in sides.items():
        model = torch.compile(module, backend=name, options=further, dynamic=False)
        steps[name] = case.step(model)
        steps[name]()
        if case.device != "cpu":
            # What the first side's step held is not to be missing while the second one is compiled, nor in other processes.
            module.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    return steps


def compare(
    case: Case, steps: Mapping[str, Step], *, seconds: float, clock: harness.CpuClock = "wall"
) -> dict[str, str]:
    """COLUMNS of one case, from the steps of `compile_both`; the timing alone takes about `seconds`."""
    return {
        **chosen(attn_compiler.reports()),
        **harness.timing_columns(harness.interleave(steps, case.device, seconds=seconds, clock=clock)),
        **checked(case, steps[BACKEND]),
    }


def checked(case: Case, ours: Step) -> dict[str, str]:
    """`numerics`, or that there was no memory: the uncompiled float32 model holds every score of every layer."""
    try:
        return numerics(case, ours)
    except torch.OutOfMemoryError:
        return {"error": "", "error_eager": "", "numerics": NO_MEMORY}


def chosen(reports: Sequence[Report]) -> dict[str, str]:
    """Sites found, anchors missed, and the lowering of each site ("sdpa_flash x8")."""
    counts = Counter[str]()
    for report in reports:
        for site in report.sites:
            counts[site.decision.lowering] += len(site.modules)
    return {
        "sites": str(sum(counts.values())),
        "misses": str(sum(len(miss.modules) for report in reports for miss in report.misses)),
        "lowerings": " + ".join(f"{name} x{count}" for name, count in counts.most_common()),
    }


def numerics(case: Case, ours: Step) -> dict[str, str]:
    """FlashAttention's rule: our error against float32 is at most twice (softcap: 3 times) that of the uncompiled model in its dtype.

    Of a forward the output is compared, of a training step all the parameters' gradients, as ‖x - reference‖ / ‖reference‖.
    """
    plain = case.plain or case.model
    values = {"error": results(case, case.model, ours), "error_eager": results(case, plain, case.step(plain))}
    precise = copy.deepcopy(plain).float()
    inputs = pytree.tree_map(
        lambda v: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, dict(case.inputs)
    )
    reference = results(case, precise, case.step(precise, inputs))
    errors = {name: relative_error(value, reference) for name, value in values.items()}
    allowed = (3 if case.softcap else 2) * errors["error_eager"] + ROUNDING_NOISE
    columns = {name: f"{error:.3g}" for name, error in errors.items()}
    return columns | {"numerics": "ok" if errors["error"] <= allowed else "WRONG"}


def results(case: Case, model: nn.Module, step: Step) -> list[torch.Tensor]:
    """What a step is compared by: its output, or all the parameters' gradients. Gradients are forgotten."""
    output = step()
    if case.training:
        # A parameter that the loss does not reach has no gradient eagerly, and may have one of zeros compiled.
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return gradients
    return [output if case.valid is None else output[case.valid]]


def relative_error(value: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """‖value - reference‖ / ‖reference‖ over all the tensors together; NaN where anything is not finite."""
    difference = sum(float((v.double() - r.double()).square().sum()) for v, r in zip(value, reference, strict=True))
    norm = sum(float(r.double().square().sum()) for r in reference)
    return (difference / norm) ** 0.5
