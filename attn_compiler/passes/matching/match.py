"""Anchors to sites: each softmax and SDPA call of the mirror is given to the patterns that start from it."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from attn_compiler.passes.graph import closed, faults, gradients, mutation, program, regions
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match, Miss, Refused, Site
from attn_compiler.passes.graph.unit import Unit, is_anchor_like, module_path, source_line, tensor_kind
from attn_compiler.passes.matching import nested_calls, routers
from attn_compiler.passes.matching.patterns import PATTERNS, Pattern
from attn_compiler.passes.recovering import flex_blocks, reading
from attn_compiler.passes.spelling.flex import Spelled
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason

_ON_PLAIN = "call attention on plain tensors, such as the local ones of a DTensor (x.to_local())"


def run(unit: Unit, mirror: Mirror) -> None:
    """Fill in unit.sites, unit.misses and unit.untried, in graph order."""
    for node in unit.graph.nodes:
        if is_anchor_like(node) and closed.is_closed(node):
            unit.untried.setdefault(node, _closed(node))
    scopes = regions.of(unit.graph)
    of_flex = _spelled_out(unit, mirror)
    for anchor in mirror.graph.nodes:
        patterns = [p for p in PATTERNS if anchor.target in p.anchors]
        spelled = of_flex.get(mirror.owner(anchor))
        if not patterns or (spelled is not None and spelled.call in unit.untried):
            continue
        found: Site | Miss | None = None
        with faults.confined(unit, "match", _module(mirror, anchor)) as attempt:
            found = _match(mirror, anchor, patterns, scopes)
        if attempt.reason is not None:
            names = ", ".join(pattern.name for pattern in patterns)
            found = Miss(anchor=anchor, nearest=names, stopped_at=anchor, reason=attempt.reason)
        if isinstance(found, Site):
            if spelled is not None:
                found.match = dataclasses.replace(found.match, pattern=spelled.pattern, decomposed=False)
            found.notes.extend(_said_of(unit, mirror, anchor))
            unit.sites.append(found)
        elif found is not None and not routers.is_choice(mirror, anchor):
            unit.misses.append(found)


def _said_of(unit: Unit, mirror: Mirror, anchor: fx.Node) -> list[str]:
    owner = mirror.owner(anchor)
    return [unit.local[owner]] if owner in unit.local else []


def _spelled_out(unit: Unit, mirror: Mirror) -> dict[fx.Node | None, Spelled]:
    """By Dynamo node, what belongs to a call of FlexAttention's. Calls whose blocks may not be those of their mask_mod are left alone."""
    for one in unit.spelled:
        if one.blocks is None or one.allowed is None:
            continue
        with faults.confined(unit, "match", module_path(one.call)) as attempt:
            reason = flex_blocks.differs(one.blocks, one.allowed, mirror, reading.of_unit(unit))
        reason = attempt.reason or reason
        if reason is not None:
            unit.untried[one.call] = reason
    return {node: one for one in unit.spelled for node in one.nodes}


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
        raise Refused(
            code=Code.INSIDE_A_CALL,
            rule="the attention's output is a value of the captured graph",
            observed=f"it is inside the call {owner.name if owner else match.out.name}",
            at=match.out,
            progress=5,
        )
    if scopes[out].transforms:
        raise Refused(
            code=Code.TRANSFORM,
            rule="the attention is not inside a transform of torch.func",
            observed="vmap, grad, vjp or jvp is applied to it in the graph",
            at=match.out,
            progress=5,
        )
    if scopes[out].sdpa_kernel:
        raise Refused(
            code=Code.CHOSEN_BY_SCOPE,
            rule="the kernel is not already chosen by an sdpa_kernel scope",
            observed="the call is inside one",
            remedy="remove torch.nn.attention.sdpa_kernel to let the backend choose",
            at=match.out,
            progress=5,
        )
    stopped = gradients.stopped_at(mirror, match.covered) if gradients.known(mirror, match.out) else None
    if stopped is not None:
        raise Refused(
            code=Code.GRADIENT_STOPPED,
            rule="the gradient of the output reaches the scores",
            observed=f"{stopped.name} stops it",
            remedy="compute the whole attention in one grad mode",
            at=stopped,
            progress=5,
        )
    of_site = (*match.covered, *program.sources(match))
    reshaped = mutation.reshaped(mirror, set().union(*map(mutation.storages, of_site)))
    if reshaped is not None:
        raise Refused(
            code=Code.RESHAPED_IN_PLACE,
            rule="no tensor of the attention changes its shape in place",
            observed=f"{reshaped.target} ({reshaped.name})",
            at=reshaped,
            progress=5,
        )
    for operand in (match.q, match.k, match.v):
        kind = _kind(mirror, operand.root)
        if kind is not None:
            raise Refused(
                code=Code.CLOSED_TENSOR,
                rule="q, k and v are plain strided tensors",
                observed=kind,
                at=match.out,
                progress=5,
            )


def _closed(node: fx.Node) -> Reason:
    return Reason(
        code=Code.CLOSED_TENSOR,
        rule="q, k, v and what joins the scores are plain strided tensors",
        observed=closed.kind(node) or "an object of another kind is given",
        remedy=nested_calls.REMEDY if closed.is_of_nested(node) else _ON_PLAIN,
    )


def _kind(mirror: Mirror, node: fx.Node) -> str | None:
    dynamo = mirror.dynamo_node(node)
    value = dynamo.meta.get("example_value") if dynamo is not None else None
    return tensor_kind(value) if isinstance(value, torch.Tensor) else None


def _module(mirror: Mirror, node: fx.Node) -> str:
    owner = mirror.owner(node)
    return module_path(owner) if owner is not None else "(no module)"
