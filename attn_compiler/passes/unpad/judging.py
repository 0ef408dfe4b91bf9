"""The judgement on a packed graph: it stays if each attention has a kernel that leaves out pairs of tokens of two rows."""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.padding_outcome import KeptGraph, Packed
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.unpad.packing import Trial
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.reasons.codes import Code
from attn_compiler.torch_private import packed as torch_packed

#: lowerings that compute no pair of tokens of two rows
LEAVING_OUT = ("rows", "hopper", "triton")


def judged(unit: Unit, trial: Trial, failed: Exception | None) -> Packed | KeptGraph:
    """Return the outcome for the padding; the unit is restored if padding stays. failed: the exception of a step on the packed graph."""
    reason = None
    try:
        with faults.confined(unit.log, "unpad", unit.name or "the graph") as attempt:
            try:
                if failed is not None:
                    raise failed
                _check_all_packed(unit.found.sites, len(trial.before.found.sites))
            except KeepsPadding as kept:
                reason = kept.reason
    except Exception:
        torch_packed.forget_guards(trial.packed.inputs)
        raise
    reason = attempt.reason or reason
    if reason is None:
        unit.found = dataclasses.replace(unit.found, untried={})
        return trial.packed
    torch_packed.forget_guards(trial.packed.inputs)
    told = unit.log.faults[-1:] if attempt.reason is not None else []
    trial.before.put_back(unit)
    unit.log.faults.extend(told)
    return KeptGraph(reason=reason)


def _check_all_packed(sites: tuple[Site, ...], expected: int) -> None:
    """Raise KeepsPadding for an attention without such a kernel, or that was not understood."""
    for site in sites:
        decision = site.decision
        if decision is None or decision.lowering == UNTOUCHED:
            said = "; ".join(f"{r.lowering}: {r.reasons[0]}" for r in decision.refusals) if decision else "none"
            raise KeepsPadding(Code.PADDING_NO_KERNEL, "a kernel leaves out pairs of tokens of two rows", said)
    if len(sites) != expected:
        raise KeepsPadding(Code.PADDING_NO_KERNEL, "each packed attention is understood", f"{len(sites)} of {expected}")
