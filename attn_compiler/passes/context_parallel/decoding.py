"""Attention over a cache that ranks share: each rank attends to the slots that it keeps, and the results are merged.

The cache gives attention the keys of all ranks (`keys_of_slots`), which is right without this pass. If k and v are these keys and values,
a site reads the slots instead, and gives its logsumexp. Its mask is taken at the positions of the slots: position p is slot p // size of
rank p % size.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from attn_compiler.context_parallel import ContextParallel, collectives as torch_collectives, merge_ops as torch_merges
from attn_compiler.lowerings.graph_ops.lse_op import attention_with_lse
from attn_compiler.passes.context_parallel import first_look
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.context_parallel.first_look import FirstLook
from attn_compiler.passes.graph import mutation, program
from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match, Operand, Site
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.passes.recovering import keyless, recover
from attn_compiler.passes.writing import lower
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import DenseBias, Sinks, Softcap

#: the note on a site without the option
NO_OPTION = 'compile with options={"context_parallel": cp}, so that each rank attends to its own'


@dataclass(frozen=True, kw_only=True)
class SlotOutcome:
    """The outcome by module of each site.

    sent: the bytes that a rank sends in a call, None where sizes are symbols. kept: why the site still gathers keys.
    """

    sent: dict[str, int | None] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def rewrite(
    unit: Unit, mirror: Mirror, sites: Sequence[Site], cp: ContextParallel
) -> tuple[SlotOutcome, FirstLook | None]:
    """Let each site that can read this rank's slots, and merge. The graph has to be matched again if any does.

    With options.verify, also returns the graph as it was.
    """
    builder = GraphBuilder(unit.graph, mirror, unit.mode)
    layout = GraphLayout(size=cp.size, group=cp.group_name, is_balanced=False)
    found, rewritten = SlotOutcome(), {}
    look = _look(unit, mirror, sites, cp) if unit.options.verify else None
    for site in first_look.in_order(mirror, sites):
        unit.log.current = site.module
        if site.spec is None:
            raise ValueError(f"the site at {site.module} has no spec")
        why = why_not(mirror, site, site.spec, cp)
        if why is not None:
            found.kept[site.module] = why
            continue
        with builder.at(site.match.out, with_grad=False) as old:
            out = _emitted(mirror, site, site.spec, builder, layout)
            found.sent[site.module] = _sent(builder.value(out), cp.size)
            new = lower.finish(mirror, site, builder, out, old)
        unread = lower.unread(mirror, site, [old])
        builder.replace(old, new)
        rewritten[old.name] = new
        for node in unread:
            unit.graph.erase_node(node)
    builder.erase_unused([])
    for node in reversed(unit.graph.nodes):
        if node.target is torch_collectives.keys_of_slots and not node.users:
            unit.graph.erase_node(node)
    unit.graph_module.recompile()
    return found, None if look is None or not rewritten else dataclasses.replace(look, rewritten=rewritten)


def _look(unit: Unit, mirror: Mirror, sites: Sequence[Site], cp: ContextParallel) -> FirstLook:
    return FirstLook(
        cp=cp,
        beside=(),
        mirror=mirror,
        original=first_look.runnable_copy(unit.graph),
        sites=tuple(first_look.in_order(mirror, sites)),
        axes={},
        has_whole=True,
    )


def note_decoding(found: FoundSites, outcome: SlotOutcome, size: int) -> None:
    """Note on each site the bytes that ranks send for it, or why it still gathers."""
    for site in found.sites:
        if site.module in outcome.sent:
            sent = outcome.sent[site.module]
            how_much = "what it has" if sent is None else amount(sent)
            said = f"each of {size} ranks attends to the keys that it keeps, and sends {how_much} in each call"
        else:
            why = outcome.kept.get(site.module, "of unknown origin")
            said = f"keys of a cache that ranks share are gathered in each call: {why}"
        site.notes.append(f"context parallel: {said}")


def amount(sent: int) -> str:
    """Write bytes in words."""
    return f"{sent / 2**20:.1f} MiB" if sent >= 2**20 else f"{sent} bytes"


# ---- reasons to gather ---------------------------------------------------------------------------------------------------


def why_not(mirror: Mirror, site: Site, spec: AttentionSpec, cp: ContextParallel) -> str | None:
    """Return why a site can't read the slots of this rank alone; None if it can."""
    match = site.match
    # The mirror nodes that give the keys and values of all ranks.
    nodes = [x.root if x.root.target is torch_collectives.keys_of_slots else None for x in (match.k, match.v)]
    if any(node is None for node in nodes):
        return "its keys and values are not what the cache gives"
    for node, operand, name in zip(nodes, (match.k, match.v), ("keys", "values"), strict=True):
        if node is None or tuple(node.args[1:]) != (cp.size, cp.group_name):
            return "the cache is shared by other ranks than ContextParallel's"
        # Batch, heads, positions and width, one by one.
        width = match.axes.head_dim_qk if operand is match.k else match.axes.head_dim_v
        if not program.is_arranged(operand, (match.axes.batch, match.axes.heads_kv, match.axes.key, width)):
            return f"the {name} are not read as the cache gives them: (batch, heads, positions, width)"
        if not _is_unwritten(mirror, node, match.out):
            return "the cache is written to between what it gives and the attention"
    if not isinstance(spec.seqlen_kv, int) or (match.scores.is_causal and not isinstance(spec.seqlen_q, int)):
        return f"how many positions there are is not known when the graph is compiled: {spec.seqlen_q} and {spec.seqlen_kv}"
    return _changed(site, spec)


def _changed(site: Site, spec: AttentionSpec) -> str | None:
    """Return a feature of the site that merging does not support, or None."""
    if spec.needs_grad:
        return "it has a gradient"
    if spec.score.dropout_p:
        return "weights are dropped"
    if spec.returns_weights:
        return "its weights are read"
    if keyless.shuts_queries_out(site.keyless):
        return "queries that a mask shuts out get the mean of v"
    if site.match.scores.limits:
        return "scores are clamped"
    if spec.stored is not None or spec.latent is not None:
        return "keys and values are made of what the cache holds"
    unknown = [x.words for x in spec.score.changes if not isinstance(x, (Softcap, Sinks, DenseBias))]
    return f"the scores are changed: {unknown[0]}" if unknown else None


def _is_unwritten(mirror: Mirror, given: fx.Node, at: fx.Node) -> bool:
    """Return whether the slots are unchanged at a mirror node since the keys of all ranks were made of them."""
    slots = given.args[0]
    if not isinstance(slots, fx.Node) or mirror.dynamo_node(slots) is None:
        return False
    before, after = (mutation.version(mirror, slots, mirror.order(node)) for node in (given, at))
    return before.since is after.since


# ---- nodes ---------------------------------------------------------------------------------------------------------------


def _emitted(mirror: Mirror, site: Site, spec: AttentionSpec, builder: GraphBuilder, layout: GraphLayout) -> fx.Node:
    """Emit the replacement of the site's output, (B, H, Q, D)."""
    match, call = site.match, builder.call
    with builder.without_autocast():
        tensors = program.build(mirror, match, builder, recover.compute_dtype(match))
        k, v = (
            program.cast(builder, _slots(builder, operand), builder.value(x).dtype)
            for operand, x in ((match.k, tensors.k), (match.v, tensors.v))
        )
        mask = _mask(builder, layout, match, tensors.mask, tensors.q, k)
        given = {"scale": spec.score.scale, "softcap": spec.score.softcap}
        both = call(attention_with_lse, tensors.q, k, v, mask, False, **given)
        out, lse = (call(operator.getitem, both, i) for i in range(2))
        return call(torch_merges.merged_over_ranks, out, lse, tensors.sinks, layout.size, layout.group)


def _slots(builder: GraphBuilder, operand: Operand) -> fx.Node:
    """Return this rank's slots, from which the operand's keys of all ranks are made."""
    kept: fx.Node = operand.root.args[0]  # type: ignore[assignment]
    return builder.leaf(kept)


def _mask(
    builder: GraphBuilder, layout: GraphLayout, match: Match, mask: fx.Node | None, q: fx.Node, k: fx.Node
) -> fx.Node | None:
    """Return the mask, which broadcasts to (B, H, Q, keys), at the keys of this rank."""
    call, value = builder.call, builder.value
    slots, device = int(value(k).shape[2]), value(k).device

    def positions() -> fx.Node:
        own = call(torch.mul, call(torch.arange, slots, device=device), layout.size)
        return call(torch.add, own, layout.rank(builder, device))

    at = builder.once(("positions of slots", layout, slots, device), positions)
    if mask is not None and value(mask).shape[3] != 1:
        whole = mask
        mask = builder.once(("of slots", whole, at), lambda: call(torch.index_select, whole, 3, at))
    if not match.scores.is_causal:
        return mask
    queries = call(torch.arange, value(q).shape[2], device=device)
    causal = call(torch.le, call(torch.Tensor.view, at, (1, 1, 1, -1)), call(torch.Tensor.view, queries, (1, 1, -1, 1)))
    if mask is None:
        return causal
    if value(mask).dtype == torch.bool:
        return call(torch.logical_and, mask, causal)
    return call(torch.where, causal, mask, -math.inf)


def _sent(out: torch.Tensor, size: int) -> int | None:
    """Return the bytes that a rank sends: its outputs, each row with its logsumexp, to all others."""
    wide = torch.promote_types(out.dtype, torch.float32).itemsize
    *rows, width = out.shape
    if not all(isinstance(n, int) for n in (*rows, width)):
        return None
    return (size - 1) * math.prod(rows) * (width + 1) * wide
