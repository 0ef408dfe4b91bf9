"""The first lowering that does not refuse, in the order measured for the target: once for each distinct spec."""

from __future__ import annotations

import dataclasses

from attn_compiler.decisions import Decision, Reason, Refusal
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.choice import fp8_speed, priorities
from attn_compiler.options import Options
from attn_compiler.passes import faults, fp8_sites
from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.site import Site
from attn_compiler.passes.unit import Unit
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target

UNTOUCHED = "untouched"


def run(unit: Unit, mirror: Mirror) -> None:
    """Give every site its decision."""
    fp8_sites.apply(unit)
    decided: dict[AttentionSpec, Decision] = {}
    for site in unit.sites:
        unit.current = site.module
        with faults.confined(unit, "select", site.module) as attempt:
            spec = site.spec
            if spec is None:
                raise ValueError(f"the site at {site.module} has no spec")
            if spec not in decided:
                decided[spec] = decide(spec, unit.target(spec.device), unit.options)
            site.decision = decided[spec]
        if attempt.reason is not None:
            leave_alone(site, attempt.reason)


def leave_alone(site: Site, reason: Reason) -> None:
    """Take back the decision of a site, which keeps the model's own computation for this reason."""
    refused = Refusal(lowering="any" if site.decision is None else site.decision.lowering, reasons=(reason,))
    before = () if site.decision is None else site.decision.refusals
    site.decision = Decision(lowering=UNTOUCHED, refusals=(*before, refused))
    site.copies.clear()


def decide(spec: AttentionSpec, target: Target, options: Options) -> Decision:
    """The lowering for a spec on a target. Reads nothing else: no environment, no tensor values, no globals."""
    refusals: list[Refusal] = []
    for name in _candidates(spec, target, options):
        reasons = by_name(name).why_not(spec, target) or _slower(name, spec, target, options)
        if not reasons:
            return Decision(lowering=name, refusals=tuple(refusals))
        refusals.append(Refusal(lowering=name, reasons=tuple(reasons)))
    return Decision(lowering=UNTOUCHED, refusals=tuple(refusals))


def _slower(name: str, spec: AttentionSpec, target: Target, options: Options) -> list[Reason]:
    """Why FP8 does not pay here, unless it was asked for by name."""
    is_named = options.lowering is not None or options.lowerings is not None
    if name not in priorities.FP8 or spec.fp8 is None or spec.fp8.force or is_named:
        return []
    other = decide(dataclasses.replace(spec, fp8=None), target, options)
    return fp8_speed.check(spec, target, name, other.lowering)


def _candidates(spec: AttentionSpec, target: Target, options: Options) -> tuple[str, ...]:
    if options.lowering is not None:
        return (options.lowering,)
    if options.lowerings is not None:
        return options.lowerings
    return priorities.order(spec, target)
