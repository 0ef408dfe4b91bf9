"""The first lowering that does not refuse, in the order measured for the target: once for each distinct spec."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Set

from attn_compiler import lowerings
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import FP8, UNTOUCHED
from attn_compiler.options.options import Options
from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.spelling import flex, library_calls
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Decision, Faster, Reason, Refusal
from attn_compiler.reasons.errors import LoweringUnavailable
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target


def select_lowerings(
    unit: Unit, found: FoundSites, targets: Mapping[str, Target], among: tuple[str, ...] | None = None
) -> None:
    """Give every site its decision. targets: by device type. among: the only lowerings that may serve; None: whichever options allow."""
    options = unit.options if among is None else _among(unit.options, among)
    decided: dict[tuple[AttentionSpec, bool], Decision] = {}
    with_packages: dict[tuple[AttentionSpec, bool], Faster | None] = {}
    for site in found.sites:
        unit.log.current = site.module
        with faults.confined(unit.log, "select", site.module) as attempt:
            spec = site.spec
            if spec is None:
                raise ValueError(f"the site at {site.module} has no spec")
            of_flex = site.match.pattern in (flex.NAME, library_calls.NAME)
            if (spec, of_flex) not in decided:
                decided[spec, of_flex] = decide(spec, targets[spec.device], options, of_flex)
            site.decision = decided[spec, of_flex]
            if not _is_named(options):
                site.evidence = lowerings.evidence(spec, targets[spec.device])
                if (spec, of_flex) not in with_packages:
                    with_packages[spec, of_flex] = faster(spec, targets[spec.device], site.decision)
                site.faster = with_packages[spec, of_flex]
            site.estimate = lowerings.estimate(spec, targets[spec.device], site.decision.lowering)
        if attempt.reason is not None:
            leave_alone(site, attempt.reason)


def _among(options: Options, names: tuple[str, ...]) -> Options:
    """The same, of whose lowerings only some may serve."""
    asked = _asked(options) or names
    return dataclasses.replace(options, lowering=None, lowerings=tuple(n for n in asked if n in names) or (UNTOUCHED,))


def leave_alone(site: Site, reason: Reason) -> None:
    """Take back the decision of a site, which keeps the model's own computation for this reason."""
    refused = Refusal(lowering="any" if site.decision is None else site.decision.lowering, reasons=(reason,))
    before = () if site.decision is None else site.decision.refusals
    site.decision = Decision(lowering=UNTOUCHED, refusals=(*before, refused))
    site.evidence = site.estimate = site.faster = None
    site.copies.clear()


def decide(spec: AttentionSpec, target: Target, options: Options, of_flex: bool = False) -> Decision:
    """The lowering for a spec on a target. Reads nothing else: no environment, no tensor values, no globals.

    of_flex: FlexAttention's own kernel computes it if no other one does, or a library's that the model calls.
    """

    @functools.cache
    def without_fp8() -> str:
        """The lowering that the spec gets without its recipe."""
        return decide(dataclasses.replace(spec, fp8=None), target, options, of_flex).lowering

    refusals: list[Refusal] = []
    for name in _candidates(spec, target, options):
        lowering = by_name(name)
        reasons = (lowering.cannot_package() if target.packaged else []) or lowering.why_not(spec, target)
        reasons = reasons or lowerings.check_own_rows(spec, name) or lowerings.check_scope(spec, name)
        if not reasons and _may_be_slower(name, spec, options):
            reasons = lowerings.check_fp8_speed(spec, target, name, without_fp8())
        if not reasons and of_flex and not _is_named(options):
            reasons = lowerings.check_flex_call(spec, name)
        if not reasons and not _is_named(options):
            reasons = lowerings.check_added_speed(spec, name)
        # Last: it may build kernels.
        broken = [] if reasons else lowerings.cannot_build(name, spec, target)
        if not reasons and not broken:
            is_unasked = name == UNTOUCHED and not refusals and not _is_named(options)
            return Decision(lowering=name, refusals=_none_asked(spec, target) if is_unasked else tuple(refusals))
        refusals.append(Refusal(lowering=name, reasons=tuple(reasons or broken), when_built=bool(broken)))
    return Decision(lowering=UNTOUCHED, refusals=tuple(refusals))


def _none_asked(spec: AttentionSpec, target: Target) -> tuple[Refusal, ...]:
    """Why no lowering was asked at all: for such a site on such a machine, none is known to gain anything."""
    row = lowerings.evidence(spec, target)
    reason = Reason(
        code=Code.OWN_IS_FASTEST,
        rule="a kernel is known to be faster than what the inner compiler makes of the model's own attention",
        observed=f"none is for such a site on {target.words}" if row is None else f"{row.why} ({row.since})",
        remedy="options={'lowering': ...} takes a kernel all the same",
    )
    return (Refusal(lowering="any", reasons=(reason,)),)


def faster(spec: AttentionSpec, target: Target, decision: Decision) -> Faster | None:
    """The fastest lowering that would take the site with a package that the machine lacks, if it was measured to be faster."""
    refused = {refusal.lowering for refusal in decision.refusals}
    for found, machine in lowerings.faster(spec, target, decision.lowering):
        if found.lowering in refused and machine != target and not by_name(found.lowering).why_not(spec, machine):
            return found
    return None


def _may_be_slower(name: str, spec: AttentionSpec, options: Options) -> bool:
    """Whether a lowering has to be faster to be chosen: one in FP8 that the user did not ask for by name."""
    return name in FP8 and spec.fp8 is not None and not spec.fp8.force and not _is_named(options)


def _is_named(options: Options) -> bool:
    return _asked(options) is not None


def _asked(options: Options) -> tuple[str, ...] | None:
    """What the user named, but for lowerings of linear attention."""
    return tuple(name for name in options.asked or () if name not in lowerings.LINEAR_NAMES) or None


def _candidates(spec: AttentionSpec, target: Target, options: Options) -> tuple[str, ...]:
    return _asked(options) or lowerings.order(spec, target)


def require_available(options: Options, devices: Set[str], targets: Iterable[Target]) -> None:
    """Raise LoweringUnavailable if the one lowering asked for can't run at all on the device of some site. devices: of the sites."""
    if options.lowering is None or options.lowering in lowerings.LINEAR_NAMES:
        return
    (lowering,) = (one for one in lowerings.LOWERINGS if one.name == options.lowering)
    for target in (target for target in targets if target.device in devices):
        reasons = tuple(lowering.unavailable(target))
        if reasons:
            raise LoweringUnavailable(lowering=options.lowering, target=target.words, reasons=reasons)
