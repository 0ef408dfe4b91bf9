"""The first lowering that does not refuse, in the order measured for the target: once for each distinct spec."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from attn_compiler import lowerings
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import FP8, UNTOUCHED
from attn_compiler.options.options import Options
from attn_compiler.passes.graph import faults
from attn_compiler.passes.graph.onward import Trial
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.spelling import flex, library_calls
from attn_compiler.reasons.decisions import Decision, Faster, Reason, Refusal
from attn_compiler.reasons.errors import LoweringUnavailable
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

#: head dims that every kernel takes are multiples of this
_VECTOR = 8
_FEW_QUERIES = 16


def add_targets(found: FoundSites, targets: dict[str, Target]) -> None:
    """Add this machine for devices that have none."""
    for device in {site.spec.device for site in found.sites if site.spec is not None} - targets.keys():
        targets[device] = Target.current(device)


def select_lowerings(unit: Unit, found: FoundSites, targets: Mapping[str, Target], trial: Trial | None = None) -> None:
    """Give every site its decision. targets: by device type. trial: may name the only lowerings that serve its graph."""
    among = None if trial is None else trial.among
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
            spec = site.spec = spec.with_zeros(site.decision.zeros)
            if _asked(options) is None:
                site.evidence = lowerings.evidence(spec, targets[spec.device])
                if (spec, of_flex) not in with_packages:
                    with_packages[spec, of_flex] = faster(spec, targets[spec.device], site.decision)
                site.faster = with_packages[spec, of_flex]
            site.estimate = lowerings.estimate(spec, targets[spec.device], site.decision.lowering)
        if attempt.reason is not None:
            leave_alone(site, attempt.reason)


def _among(options: Options, names: tuple[str, ...]) -> Options:
    """Return options that allow only some of their lowerings."""
    asked = _asked(options) or names
    return dataclasses.replace(options, lowering=None, lowerings=tuple(n for n in asked if n in names) or (UNTOUCHED,))


def leave_alone(site: Site, reason: Reason) -> None:
    """Withdraw the decision of a site, which keeps the model's own computation for this reason."""
    refused = Refusal(lowering="any" if site.decision is None else site.decision.lowering, reasons=(reason,))
    before = () if site.decision is None else site.decision.refusals
    site.decision = Decision(lowering=UNTOUCHED, refusals=(*before, refused))
    site.evidence = site.estimate = site.faster = None
    site.copies.clear()


@dataclass(frozen=True, kw_only=True)
class Question:
    """All that a decision reads: no environment, no tensor values, no globals.

    of_flex: FlexAttention's own kernel computes the site if no other one does, or a library's that the model calls.
    """

    spec: AttentionSpec
    target: Target
    options: Options
    of_flex: bool = False

    @property
    def is_named(self) -> bool:
        """True if the user names lowerings."""
        return _asked(self.options) is not None

    @functools.cached_property
    def without_fp8(self) -> str:
        """The lowering that the site gets without its recipe."""
        return decide(dataclasses.replace(self.spec, fp8=None), self.target, self.options, self.of_flex).lowering


def _slow_in_fp8(of: Question, name: str) -> list[Reason]:
    """Object to a lowering in FP8 that has to be faster, since the user did not ask for it by name, and is not."""
    recipe = of.spec.fp8
    if name not in FP8 or recipe is None or recipe.force or of.is_named:
        return []
    return lowerings.check_fp8_speed(of.spec, of.target, name, of.without_fp8)


def _of_flex(of: Question, name: str) -> list[Reason]:
    return lowerings.check_flex_call(of.spec, name, by_name(name).reads_pairs(of.spec, of.target))


#: checks that may object to a lowering, in their order
OBJECTIONS: tuple[Callable[[Question, str], list[Reason]], ...] = (
    lambda of, name: by_name(name).cannot_package() if of.target.packaged else [],
    lambda of, name: by_name(name).why_not(of.spec, of.target),
    lambda of, name: lowerings.check_own_rows(of.spec, name),
    lambda of, name: lowerings.check_scope(of.spec, name),
    _slow_in_fp8,
    lambda of, name: [] if of.is_named or not of.of_flex else _of_flex(of, name),
    lambda of, name: [] if of.is_named else lowerings.check_added_speed(of.spec, name),
)


def _objection(of: Question, name: str) -> Refusal | None:
    for ask in OBJECTIONS:
        if reasons := ask(of, name):
            return Refusal(lowering=name, reasons=tuple(reasons))
    # This comes last, since it may build kernels.
    broken = lowerings.cannot_build(name, of.spec, of.target)
    return Refusal(lowering=name, reasons=tuple(broken), when_built=True) if broken else None


def decide(spec: AttentionSpec, target: Target, options: Options, of_flex: bool = False) -> Decision:
    """Return the lowering for a spec on a target. Arguments: as in Question."""
    of = Question(spec=spec, target=target, options=options, of_flex=of_flex)
    decision = _first(of)
    if decision.lowering == UNTOUCHED and _may_get_zeros(of):
        second = _first(dataclasses.replace(of, spec=spec.with_zeros(_VECTOR)))
        if second.lowering != UNTOUCHED:
            return dataclasses.replace(second, zeros=_VECTOR)
    if of.is_named or decision.lowering != UNTOUCHED:
        return decision
    remedy = "options={'lowering': ...} takes a kernel all the same"
    return lowerings.with_reason(decision, lowerings.evidence(spec, target), target, "attention", remedy)


def _first(of: Question) -> Decision:
    order = _asked(of.options) or lowerings.order(of.spec, of.target)
    return lowerings.first_unopposed(order, functools.partial(_objection, of))


def _may_get_zeros(of: Question) -> bool:
    """Return whether zeros behind each head's numbers pay where some kernel takes the head dims that they make.

    They cost copies of q, k and v: less than scores in memory, but more than a step of few queries over a cache. PyTorch's FlashAttention
    adds them by itself (`pad_last_dim` of its transformers/sdp_utils), so calls that it takes stay.
    """
    spec, wide = of.spec, of.spec.with_zeros(_VECTOR)
    is_step = isinstance(spec.seqlen_q, int) and spec.seqlen_q <= _FEW_QUERIES
    has_others = spec.fp8 is not None or spec.stored is not None or spec.latent is not None
    if wide == spec or is_step or has_others or of.of_flex:
        return False
    return of.is_named or spec.decomposed or bool(by_name("sdpa_flash").why_not(wide, of.target))


def faster(spec: AttentionSpec, target: Target, decision: Decision) -> Faster | None:
    """Return the fastest lowering that would take the site with a package that the machine lacks, if it was measured to be faster."""
    refused = {refusal.lowering for refusal in decision.refusals}
    for found, machine in lowerings.faster(spec, target, decision.lowering):
        if found.lowering in refused and machine != target and not by_name(found.lowering).why_not(spec, machine):
            return found
    return None


def _asked(options: Options) -> tuple[str, ...] | None:
    """Return the lowerings that the user named, except those of linear attention."""
    return tuple(name for name in options.asked or () if name not in lowerings.LINEAR_NAMES) or None


def require_available(options: Options, devices: Set[str], targets: Iterable[Target]) -> None:
    """Raise LoweringUnavailable if the one lowering asked for can't run at all on the device of some site. devices: of the sites."""
    if options.lowering is None or options.lowering in lowerings.LINEAR_NAMES:
        return
    for target in (target for target in targets if target.device in devices):
        reasons = tuple(by_name(options.lowering).unavailable(target))
        if reasons:
            raise LoweringUnavailable(lowering=options.lowering, target=target.words, reasons=reasons)
