"""The passes' findings as a Report: one row for each distinct spec, however many layers share it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping

from torch import fx

from attn_compiler import lowerings
from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.passes.graph import autograd_functions, opaque_calls, unit as graph_units
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import COMES_IN, Miss, Site
from attn_compiler.passes.graph.unit import Unit, is_anchor_like, module_path, paths_of_runs, source_line
from attn_compiler.passes.matching.unseen import Unseen
from attn_compiler.passes.spelling import flex
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Decision, Reason, Refusal
from attn_compiler.reasons.errors import REPRODUCE, described
from attn_compiler.reporting.facts import LinearReport, MissReport, SiteReport
from attn_compiler.reporting.report import Report
from attn_compiler.spec import tried
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat, observe as torch_observe

_MAKE_INSIDE = (
    "make the mask in compiled code: attn_compiler.integrations.transformers.compile_model(model) for generate, "
    "compile_model(model, per_layer=True) for layers of Hugging Face models"
)


def report(
    gm: fx.GraphModule,
    units: list[Unit],
    targets: Mapping[str, Target],
    faults: tuple[str, ...] = (),
    unseen: Unseen | None = None,
    linear: tuple[LinearReport, ...] = (),
) -> Report:
    """Make the report of one graph that the backend was given.

    faults: the warnings. unseen: misses that no pattern started from. linear: layers of linear attention.
    """
    outcomes = [unit.outcome.row() for unit in units if unit.outcome is not None]
    others = [] if unseen is None else unseen.rows(graph_units.told_owners(units))
    return Report(
        graph=torch_compat.graph_name(),
        model=torch_observe.model_name(),
        target=_target(gm, targets),
        untried=tuple(sorted({said for target in _targets(gm, targets) for said in tried.notices(target)})),
        sites=tuple(_site_rows(units, targets)),
        misses=(*_miss_rows(units), *_chosen_rows(gm, units), *others),
        faults=faults,
        linear=linear,
        # That of the graph itself, or of the first body that has attention.
        unpad=next((row for row in outcomes if row is not None), None),
    )


def of_failure(gm: fx.GraphModule, targets: Mapping[str, Target], seconds: Mapping[str, float], failure: str) -> Report:
    """Make the report of a graph of which nothing was rewritten after all: no site is claimed."""
    try:
        target = _target(gm, targets)
    except Exception as error:  # noqa: BLE001 (it may be what failed in the first place, and the report has to say so)
        target = f"not known ({described(error)})"
    graph, model = torch_compat.graph_name(), torch_observe.model_name()
    return Report(graph=graph, model=model, target=target, seconds=tuple(seconds.items()), failure=failure)


def taken_back(report: Report, cause: str, failure: str) -> Report:
    """Change the report of a rewritten graph whose original was compiled in its place."""
    reason = Reason(
        code=Code.COMPILER_REFUSED,
        rule="the compiler takes the graph with its kernel in it",
        observed=cause,
        remedy=REPRODUCE,
    )
    sites = tuple(
        dataclasses.replace(
            site,
            decision=_given_up(site.decision, reason),
            copies=(),
            notes=(),
            evidence=None,
            estimate=None,
            faster=None,
            texts=(),
            reads_pairs=site.spec.has_pairs,
        )
        for site in report.sites
    )
    return dataclasses.replace(report, sites=sites, failure=failure)


def _given_up(decision: Decision, reason: Reason) -> Decision:
    if decision.lowering == UNTOUCHED:
        return decision
    refused = Refusal(lowering=decision.lowering, reasons=(reason,))
    return Decision(lowering=UNTOUCHED, refusals=(*decision.refusals, refused))


def _target(gm: fx.GraphModule, targets: Mapping[str, Target]) -> str:
    return "; ".join(sorted({target.words for target in _targets(gm, targets)}))


def _targets(gm: fx.GraphModule, targets: Mapping[str, Target]) -> set[Target]:
    """Return the machines of a report. targets: those that decisions were made for."""
    return set(targets.values()) or {Target.current(str(device)) for device in torch_compat.graph_devices(gm)}


def _site_rows(units: list[Unit], targets: Mapping[str, Target]) -> list[SiteReport]:
    rows: dict[object, list[tuple[Unit, Site]]] = {}
    for unit in units:
        for site in unit.found.sites:
            rows.setdefault(_row_key(site), []).append((unit, site))
    return [_row(found, targets) for found in rows.values()]


def _row_key(site: Site) -> object:
    # This note is on the graph that is given the mask, and not in the bodies that it passes the mask to.
    notes = tuple(note for note in site.notes if note != COMES_IN)
    return (site.match.pattern, site.spec, site.decision, tuple(site.copies), notes)


def _row(found: list[tuple[Unit, Site]], targets: Mapping[str, Target]) -> SiteReport:
    _, first = found[0]
    if first.spec is None:
        raise ValueError(f"the site at {first.module} has no spec")
    decision = first.decision or Decision(lowering=UNTOUCHED)
    return SiteReport(
        modules=tuple(path for unit, site in found for path in paths_of_runs(unit, site.module)),
        pattern=first.match.pattern,
        spec=first.spec,
        decision=decision,
        reads_pairs=lowerings.by_name(decision.lowering).reads_pairs(first.spec, targets[first.spec.device]),
        copies=tuple(first.copies),
        notes=tuple(dict.fromkeys(note for _, site in found for note in site.notes)),
        source=first.source,
        evidence=first.evidence,
        estimate=first.estimate,
        faster=first.faster,
        texts=tuple(dict.fromkeys(text for _, site in found for text in site.texts)),
        remedies=tuple(dict.fromkeys(_remedies(found))),
        target=targets[first.spec.device].words,
        options=found[0][0].options.changed(),
    )


def _remedies(found: list[tuple[Unit, Site]]) -> Iterator[str]:
    """Yield what spares copies of the sites, and what makes their mask known, where the cause is known."""
    for _, site in found:
        yield from (copy.remedy for copy in site.copies if copy.remedy is not None)
        if COMES_IN in site.notes:
            yield _MAKE_INSIDE


def _miss_rows(units: list[Unit]) -> list[MissReport]:
    rows: list[MissReport] = []
    inside = _inside(units)
    for unit in units:
        reason = unit.log.left_alone
        if reason is not None:
            rows.extend(_untried([node], node.name, reason) for node in unit.graph.nodes if is_anchor_like(node))
        rows.extend(_untried_rows(unit, inside))
        grouped: dict[tuple[str, ...], list[Miss]] = {}
        for miss in unit.found.misses:
            # Node names differ by numbers between layers: "exp_3" is "exp".
            grouped.setdefault((str(miss.anchor.target), miss.nearest, *_alike(miss.reason)), []).append(miss)
        rows.extend(_miss_row(unit, unit.mirror, misses) for misses in grouped.values() if unit.mirror is not None)
    return rows


def _alike(reason: Reason) -> tuple[str, str]:
    return reason.rule, re.sub(r"_\d+\b", "", reason.observed)


def _miss_row(unit: Unit, mirror: Mirror, misses: list[Miss]) -> MissReport:
    first = misses[0]
    owners = [mirror.owner(miss.anchor) for miss in misses]
    found = [module_path(owner) if owner is not None else "(no module)" for owner in owners]
    return MissReport(
        modules=tuple(path for module in found for path in paths_of_runs(unit, module)),
        anchor=str(first.anchor.target),
        nearest=first.nearest,
        stopped_at=_place(mirror, first.stopped_at),
        reason=first.reason,
        source=source_line(owners[0]) if owners[0] is not None else None,
    )


def _place(mirror: Mirror, node: fx.Node) -> str:
    """Name a node and the model's own line for it."""
    owner = mirror.owner(node)
    line = source_line(owner) if owner is not None else None
    return f"{node.name}, {line}" if line else node.name


def _chosen_rows(gm: fx.GraphModule, units: list[Unit]) -> list[MissReport]:
    """Return a row for each attention whose kernel the model has chosen itself, and which no pass looks at."""
    nodes = [
        node for module in torch_compat.graph_modules(gm) for node in module.graph.nodes if node.op == "call_function"
    ]
    spelled = [one.call for unit in units for one in unit.spelling.calls]
    told = {*_inside(units), *spelled, *(node for unit in units for node in unit.found.untried)}
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        name = flex.OPERATION if flex.is_call(node) else opaque_calls.name_of(node)
        if name is not None and node not in told:
            found.setdefault(name, []).append(node)
    return [_untried(calls, name, opaque_calls.reason(name)) for name, calls in found.items()]


def _untried(nodes: list[fx.Node], anchor: str, reason: Reason) -> MissReport:
    return MissReport(
        modules=tuple(map(module_path, nodes)),
        anchor=anchor,
        nearest="none tried",
        stopped_at=nodes[0].name,
        reason=reason,
        source=source_line(nodes[0]),
    )


def _inside(units: list[Unit]) -> set[fx.Node | None]:
    """Return the kernels in the bodies of autograd.Functions that were tried."""
    spelled = {one.kernel for unit in units for one in unit.spelling.calls}
    return spelled | {autograd_functions.kernel_of(node) for unit in units for node in unit.found.untried}


def _untried_rows(unit: Unit, inside: Collection[fx.Node | None]) -> list[MissReport]:
    """Return a row for all calls of one name that were not tried for one reason. inside: kernels in calls with their own row."""
    grouped: dict[tuple[str, ...], list[fx.Node]] = {}
    for node, reason in unit.found.untried.items():
        if node in inside:
            continue
        grouped.setdefault((_called(node), *_alike(reason)), []).append(node)
    return [_untried(nodes, _called(nodes[0]), unit.found.untried[nodes[0]]) for nodes in grouped.values()]


def _called(node: fx.Node) -> str:
    kernel = autograd_functions.kernel_of(node)
    return opaque_calls.name_of(node if kernel is None else kernel) or target_name(node)
