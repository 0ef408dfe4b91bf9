"""The judgement on a packed graph: it stays if each attention has a kernel that leaves out pairs of tokens of two rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.onward import Onward
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.unpad.forms import KeepsPadding
from attn_compiler.passes.unpad.outcome import KeptGraph, Packed
from attn_compiler.passes.unpad.packing import PackedTrial
from attn_compiler.passes.writing import layout, lower, select
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.target import Target


def judge(unit: Unit, trial: PackedTrial, failed: Exception | None) -> Onward | None:
    """Accept the packed graph; else restore the unit, for which kernels are selected then. failed: the exception of a step on it."""
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
        trial.packed.give_up()
        raise
    reason = attempt.reason or reason
    if reason is None:
        unit.found = dataclasses.replace(unit.found, untried={})
        unit.outcome = dataclasses.replace(trial.packed, padded=trial.before.beside(unit))
        return None
    trial.packed.give_up()
    told = unit.log.faults[-1:] if attempt.reason is not None else []
    trial.before.put_back(unit)
    unit.log.faults.extend(told)
    unit.outcome = KeptGraph(reason=reason, shares=bool(trial.packed.windows))
    return Onward(step="select")


def _check_all_packed(sites: tuple[Site, ...], expected: int) -> None:
    """Raise KeepsPadding for an attention without such a kernel, or that was not understood."""
    for site in sites:
        decision = site.decision
        if decision is None or decision.lowering == UNTOUCHED:
            said = "; ".join(f"{r.lowering}: {r.reasons[0]}" for r in decision.refusals) if decision else "none"
            raise KeepsPadding(Code.PADDING_NO_KERNEL, "a kernel leaves out pairs of tokens of two rows", said)
    if len(sites) != expected:
        raise KeepsPadding(Code.PADDING_NO_KERNEL, "each packed attention is understood", f"{len(sites)} of {expected}")


def write_padded(unit: Unit, targets: Mapping[str, Target]) -> None:
    """Write kernels into the model's own graph beside a packed one, for calls that may not be packed. It has none where a pass fails."""
    packed = unit.outcome
    if not isinstance(packed, Packed) or packed.padded is None:
        return
    padded = packed.padded
    with faults.confined(unit.log, "padded", unit.name or "the graph") as attempt:
        select.select_lowerings(padded, padded.found, targets)
        layout.choose_copies(padded, padded.found)
        lower.lower_sites(padded, padded.mirrored, padded.found, targets)
    unit.log.faults.extend(padded.log.faults)
    if attempt.reason is not None:
        unit.outcome = dataclasses.replace(packed, padded=None)
