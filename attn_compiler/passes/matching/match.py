"""Turn anchors into sites: each softmax and SDPA call of the mirror is tried against the patterns that start from it."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import fx

from attn_compiler.passes.graph import closed, faults, gradients, mutation, program, regions
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.onward import Onward
from attn_compiler.passes.graph.site import Match, Miss, Refused, Site
from attn_compiler.passes.graph.spelling import Spelling
from attn_compiler.passes.graph.unit import FoundSites, Unit, is_anchor_like, module_path, source_line, tensor_kind
from attn_compiler.passes.matching import nested_calls, routers, written_out
from attn_compiler.passes.matching.patterns import PATTERNS, Pattern, sdpa_call, softmaxes
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason

_ON_PLAIN = "call attention on plain tensors, such as the local ones of a DTensor (x.to_local())"


def find_sites(unit: Unit, mirror: Mirror, spelling: Spelling) -> FoundSites:
    """Return sites, misses, and anchors that no pattern is tried on, in graph order."""
    untried = dict(spelling.left)
    for node in unit.graph.nodes:
        if is_anchor_like(node) and closed.is_closed(node):
            untried.setdefault(node, _closed(node))
    scopes = regions.by_node(unit.graph)
    spelled_out = {node: one for one in spelling.calls for node in one.nodes}
    replaced = frozenset(node for one in spelling.calls for node in one.replaced)
    written = _Written(unit.graph)
    sites: list[Site] = []
    misses: list[Miss] = []
    for anchor in mirror.graph.nodes:
        patterns = [p for p in PATTERNS if anchor.target in p.anchors]
        owner = mirror.owner(anchor)
        spelled = None if owner is None else spelled_out.get(owner)
        if not patterns or not written.may_be(mirror, anchor) or (spelled is not None and spelled.call in untried):
            continue
        if owner in replaced:
            continue
        found: Site | Miss | None = None
        with faults.confined(unit.log, "match", _module(mirror, anchor)) as attempt:
            found = _match(mirror, anchor, patterns, scopes)
        if attempt.reason is not None:
            names = ", ".join(pattern.name for pattern in patterns)
            found = Miss(anchor=anchor, nearest=names, stopped_at=anchor, reason=attempt.reason)
        if isinstance(found, Site):
            if spelled is not None:
                found.match = dataclasses.replace(found.match, pattern=spelled.pattern, decomposed=spelled.decomposed)
                found.notes += [] if spelled.note is None else [spelled.note]
            if owner is not None and owner in spelling.local:
                found.notes.append(spelling.local[owner])
            sites.append(found)
        elif found is not None and _is_told(mirror, found):
            misses.append(found)
    # A softmax of two numbers is one way to write sinks.
    covered = frozenset[fx.Node]().union(*(site.match.covered for site in sites))
    return FoundSites(
        sites=tuple(sites), misses=tuple(miss for miss in misses if miss.anchor not in covered), untried=untried
    )


def leave_without_sites(unit: Unit, found: FoundSites) -> Onward | None:
    """Leave a graph without attention, unless other ops of it may mix positions that ranks share."""
    is_mixed = unit.options.is_context_parallel and not unit.shares_cache
    return None if found.sites or is_mixed else Onward(step="give_back")


def _is_told(mirror: Mirror, miss: Miss) -> bool:
    """Return whether an unmatched anchor is a miss. written_out.py has words for a softmax with steps that no pattern knows."""
    if miss.anchor.target in softmaxes.WRITTEN_OUT:
        return miss.reason.code not in (Code.AFTER_SOFTMAX, Code.SCORES_READ)
    if miss.anchor not in mirror.live:
        return False
    return miss.anchor.target in sdpa_call.ANCHORS or not routers.is_choice(mirror, miss.anchor)


class _Written:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph

    @functools.cached_property
    def _exponentials(self) -> frozenset[fx.Node]:
        return frozenset(one.exp for one in written_out.find(self._graph))

    def may_be(self, mirror: Mirror, anchor: fx.Node) -> bool:
        """Return whether an anchor is worth a try: an exponential must be of q kᵀ, in weights that sum to one."""
        if anchor.target not in softmaxes.WRITTEN_OUT:
            return True
        return softmaxes.read(mirror, anchor) is not None and mirror.owner(anchor) in self._exponentials


def _match(
    mirror: Mirror, anchor: fx.Node, patterns: list[Pattern], scopes: dict[fx.Node, regions.Region]
) -> Site | Miss:
    refusals: list[tuple[Pattern, Refused]] = []
    for pattern in patterns:
        try:
            match = pattern.match(mirror, anchor)
            _require_rewritable(mirror, match, scopes)
        except Refused as refused:
            refusals.append((pattern, refused))
        else:
            owner = mirror.owner(match.out)
            source = source_line(owner) if owner is not None else None
            return Site(match=match, module=_module(mirror, match.out), source=source)
    pattern, furthest = max(refusals, key=lambda r: r[1].progress)
    return Miss(anchor=anchor, nearest=pattern.name, stopped_at=furthest.at, reason=furthest.reason)


def _require_rewritable(mirror: Mirror, match: Match, scopes: dict[fx.Node, regions.Region]) -> None:
    out = mirror.dynamo_node(match.out)
    if out is None:
        owner = mirror.owner(match.out)
        rule = "the attention's output is a value of the captured graph"
        observed = f"it is inside the call {owner.name if owner else match.out.name}"
        raise Refused(Code.INSIDE_A_CALL, rule, observed, at=match.out, progress=5)
    if scopes[out].transforms:
        rule = "the attention is not inside a transform of torch.func"
        observed = "vmap, grad, vjp or jvp is applied to it in the graph"
        raise Refused(Code.TRANSFORM, rule, observed, at=match.out, progress=5)
    match.scope = scopes[out].kernels
    stopped = gradients.stopped_at(mirror, match.covered) if gradients.carries(mirror, match.out) else None
    if stopped is not None:
        rule = "the gradient of the output reaches the scores"
        raise Refused(Code.GRADIENT_STOPPED, rule, f"{stopped.name} stops it", at=stopped, progress=5)
    of_site = (*match.covered, *program.sources(match))
    reshaped = mutation.reshaped(mirror, set().union(*map(mutation.storages, of_site)))
    if reshaped is not None:
        rule = "no tensor of the attention changes its shape in place"
        raise Refused(Code.RESHAPED_IN_PLACE, rule, f"{reshaped.target} ({reshaped.name})", at=reshaped, progress=5)
    for name, operand in (("q", match.q), ("k", match.k), ("v", match.v)):
        dynamo = mirror.dynamo_node(operand.root)
        value = dynamo.meta.get("example_value") if dynamo is not None else None
        kind = tensor_kind(value) if isinstance(value, torch.Tensor) else None
        if kind is not None:
            rule = "q, k and v are plain strided tensors"
            raise Refused(Code.CLOSED_TENSOR, rule, f"{name} is {kind}", at=match.out, progress=5)


def _closed(node: fx.Node) -> Reason:
    return Reason(
        code=Code.CLOSED_TENSOR,
        rule="q, k, v and what joins the scores are plain strided tensors",
        observed=closed.kind(node) or "an object of another kind is given",
        remedy=nested_calls.REMEDY if closed.is_of_nested(node) else _ON_PLAIN,
    )


def _module(mirror: Mirror, node: fx.Node) -> str:
    owner = mirror.owner(node)
    return module_path(owner) if owner is not None else "(no module)"
