"""Attention over a sequence that the ranks of a process group have parts of (`options={"context_parallel": ContextParallel(...)}`).

following.py, ops.py: that nothing but attention mixes positions. whole.py: what masks read, of the whole sequence. layout.py and
exchanging.py: the collectives. sites.py: each attention anew; halo.py: with the keys near a rank's queries alone. decoding.py: over a cache
that ranks share. What comes out is matched, recovered and decided for like any graph.

Every reason to leave something as it was is an error, on every rank: a site that is left alone would attend to a part of the sequence.
"""

from __future__ import annotations

import dataclasses
import hashlib

from torch import fx

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.passes.context_parallel import (
    caches,
    choosing,
    decoding,
    first_look,
    following,
    outside,
    ring,
    sites,
    wrapped,
)
from attn_compiler.passes.context_parallel.compared import NotComparable, compare
from attn_compiler.passes.context_parallel.decoding import SlotOutcome
from attn_compiler.passes.context_parallel.first_look import FirstLook
from attn_compiler.passes.context_parallel.following import Following, Input
from attn_compiler.passes.context_parallel.layout import GraphLayout
from attn_compiler.passes.context_parallel.numbers import LENGTH
from attn_compiler.passes.context_parallel.places import GIVE_POSITIONS, Mixes
from attn_compiler.passes.context_parallel.refusing import CannotShard
from attn_compiler.passes.context_parallel.sites import RewrittenSite
from attn_compiler.passes.context_parallel.together import Said, together, told
from attn_compiler.passes.context_parallel.whole import Wholes
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Miss, Site
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.matching import match
from attn_compiler.passes.recovering import recover
from attn_compiler.passes.writing import lower
from attn_compiler.torch_private import frames as torch_frames, meetings as torch_meetings

#: what a user may name in ContextParallel(allow=...), besides ops
GRAPH_BREAK = "graph_break"


def asked(unit: Unit) -> ContextParallel | None:
    """What the user gave, if there is more than one rank, and each has a part of the sequence.

    A graph that takes keys out of a cache which ranks share is none such: each rank is given all new tokens, and the cache gives all keys.
    """
    found = unit.options.context_parallel
    return None if found is None or found.size == 1 or decoding.shares_cache(unit.graph) else found


def longer(unit: Unit) -> dict[int, int]:
    """By how many positions a rank has, how many there are. Raises ContextParallelUnsupported."""
    cp = asked(unit)
    if cp is None:
        return {}
    try:
        lengths = {one.length for one in following.inputs(unit.graph, cp.replicated).values()}
    except CannotShard as cannot:
        raise told(None, None, cannot.reason) from None
    return {length: length * cp.size for length in lengths}


def check_not_left(unit: Unit) -> None:
    """Raise ContextParallelUnsupported if the passes left the graph alone."""
    if asked(unit) is not None and unit.left_alone is not None:
        raise told(unit.mirror, None, unit.left_alone)


def run(unit: Unit, mirror: Mirror) -> None:
    """Rewrite every attention of the graph. Raises ContextParallelUnsupported, on all ranks, where one can't be, or something else mixes
    positions."""
    cp = asked(unit)
    if cp is not None:
        # As the graph came: the rewrite may fail halfway.
        beside = _groups_beside(unit, cp)
        together(unit, mirror, cp, beside, lambda: _rewritten(unit, mirror, cp, beside))
    elif decoding.shares_cache(unit.graph):
        given = unit.options.context_parallel
        if given is None or given.size == 1:
            _note_decoding(unit, SlotOutcome(kept={site.module: decoding.NO_OPTION for site in unit.sites}), 1)
        else:
            together(unit, mirror, given, [], lambda: _decoding(unit, mirror, given))


def _groups_beside(unit: Unit, cp: ContextParallel) -> list[str]:
    """Of the ranks that have the same part of the sequence, and other heads."""
    try:
        given = following.inputs(unit.graph, cp.replicated)
    except CannotShard:
        # It is told by `_rewritten`, and depends on sizes alone.
        return []
    return [group for group in wrapped.groups(unit.graph, given) if group != cp.group_name]


def _rewritten(unit: Unit, mirror: Mirror, cp: ContextParallel, beside: list[str]) -> Said:
    """Rewrite the graph, and say what all ranks have to agree on."""
    if not unit.is_body:
        _check_frame(unit, cp)
    given = following.inputs(unit.graph, cp.replicated)
    compared, by_value = None, ""
    difference: CannotShard | None = None
    if not unit.is_body and LENGTH not in cp.allow:
        try:
            compared = compare(unit, mirror, cp, given)
        except CannotShard as cannot:
            # What is known to be wrong of a part by itself is told first.
            difference = cannot
        except NotComparable as error:
            by_value = f"; numbers of the length were looked for by their values alone: {error}"
    places = Following(
        mirror,
        given,
        unit.sites,
        cp.allow,
        torch_meetings.ranks_of(cp.group_name),
        None if compared is None else compared.differing_axes,
    )
    others = [miss for miss in unit.misses if places.holds_still(miss.anchor)]
    _check_found(unit, others)
    for site in unit.sites:
        caches.check(mirror, site, cp.replicated)
    shared = [site for site in unit.sites if _is_shared(places, site, cp)]
    _check_outputs(mirror, places)
    if unit.options.verify:
        unit.first_look = FirstLook(
            cp=cp,
            beside=tuple(beside),
            mirror=mirror,
            original=first_look.copied(unit.graph),
            sites=tuple(first_look.in_order(mirror, unit.sites)),
            axes={node.name: one.axis for node, one in given.items()},
        )
    done, parts = _rewrite_sites(unit, mirror, cp, given, shared)
    if difference is not None:
        raise difference
    _look_again(unit, len(unit.sites) - len(shared) + parts, len(others))
    _note(unit, cp, done, by_value)
    specs = [site.spec.to_text() for site in unit.sites if site.spec is not None]
    digest = hashlib.sha256("\n".join([*specs, *(one.words for one in done.values())]).encode()).hexdigest()[:16]
    text = f"{len(shared)} attentions, {sorted({one.length for one in given.values()})} positions, {digest}"
    return Said(text=text, exchanges=bool(shared))


def _decoding(unit: Unit, mirror: Mirror, cp: ContextParallel) -> Said:
    """Rewrite a graph with a cache that ranks share, and say what all ranks have to agree on."""
    expected, others = len(unit.sites), len(unit.misses)
    found = decoding.rewrite(unit, mirror, cp)
    if found.sent:
        _look_again(unit, expected, others)
    _note_decoding(unit, found, cp.size)
    specs = "\n".join(site.spec.to_text() for site in unit.sites if site.spec is not None)
    digest = hashlib.sha256(specs.encode()).hexdigest()[:16]
    return Said(text=f"{len(found.sent)} attentions to slots, {len(found.kept)} that gather, {digest}", exchanges=True)


def _check_frame(unit: Unit, cp: ContextParallel) -> None:
    """Nothing of the model runs outside of graphs, now or after some more lengths."""
    if torch_frames.is_cut_into_buckets():
        raise CannotShard(
            "the compiled function is one graph: what masks an attention, and where the sequence is, is known in it",
            "parts of one, which the buckets of DistributedDataParallel cut",
            remedy="set torch._dynamo.config.optimize_ddp = False",
        )
    if GRAPH_BREAK not in cp.allow and not torch_frames.is_whole(unit.graph_module):
        raise CannotShard(
            "the compiled function is one graph: what runs between two of them is not looked at",
            "a graph break",
            remedy="compile with fullgraph=True, which tells where it is, or each layer by itself; if what runs there is right for a part "
            f"of the sequence, give ContextParallel(..., allow=({GRAPH_BREAK!r},))",
        )
    if torch_frames.is_last_recompilation():
        raise CannotShard(
            "a function that was compiled as often as torch._dynamo.config.recompile_limit says would run without a compiler",
            "the last time",
            remedy="raise that limit, or pad batches to fewer lengths; with fullgraph=True PyTorch itself raises there",
        )


def _check_found(unit: Unit, others: list[Miss]) -> None:
    """Whatever looks like attention was understood. others: what computes each position by itself, and so is none (a router)."""
    rule = "every attention of the graph is understood"
    for miss in (miss for miss in unit.misses if miss not in others):
        raise CannotShard(rule, str(miss.reason), at=miss.anchor)
    for call, reason in unit.untried.items():
        raise CannotShard(rule, f"{call.name}: {reason}", at=None)
    if unit.spelled:
        raise CannotShard(
            rule, "FlexAttention or a library's kernel", remedy='load the model with attn_implementation="sdpa"'
        )
    if unit.is_body or unit.callees:
        raise CannotShard(
            "attention stands in the graph itself, or in a checkpoint",
            "it is in the body of a higher-order call, such as a checkpoint in a checkpoint",
            remedy="compile each layer by itself, and call the compiled layers there",
        )
    if unit.options.fp8_recipe is not None:
        raise CannotShard("attention runs in the model's own dtype", "an fp8_recipe is given")


def _is_shared(places: Following, site: Site, cp: ContextParallel) -> bool:
    """Whether the keys of a site are on several ranks. Raises CannotShard where that is not known, or not what the rewrite is for."""
    found = site.match
    of_q = places.sequence_of(found.q.node, found.q.dims, found.query)
    of_k = places.sequence_of(found.k.node, found.k.dims, found.key)
    of_v = places.sequence_of(found.v.node, found.v.dims, found.key)
    if of_k is not of_v:
        raise CannotShard("keys and values are parts of one sequence", "they are not", at=found.out)
    if of_k is None and _is_on_all_ranks(places, site, cp, is_q_too=of_q is None):
        return False
    if of_q is None or of_q is not of_k:
        raise CannotShard(
            "queries and keys are parts of one sequence",
            "queries of none" if of_q is None else "keys of another one, or of none",
            at=found.out,
            remedy="give the model input_ids, inputs_embeds or hidden states of (batch, positions, width); name inputs that every rank has "
            "as a whole in ContextParallel(replicated=...)",
        )
    return True


def _is_on_all_ranks(places: Following, site: Site, cp: ContextParallel, *, is_q_too: bool) -> bool:
    """Whether k and v are of the model itself, or of what the user says that every rank has. is_q_too: and q."""
    seen: set[fx.Node] = set()
    left = [site.match.k.node, site.match.v.node, *([site.match.q.node] if is_q_too else [])]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += node.all_input_nodes
    given = {places.mirror.dynamo_node(node) for node in seen if node.op == "placeholder"}
    named = [node for node in given if node is not None and following.is_named(node, cp.replicated)]
    if not all(node is not None and (node in named or following.is_state(node)) for node in given):
        return False
    # As many of the model's own keys as the rank has positions: the model takes as many as there are.
    return bool(named) or (not is_q_too and axes.dim_size(site.match.key) not in {atom.size for atom in places.atoms})


def _check_outputs(mirror: Mirror, places: Following) -> None:
    """What the graph gives back, and what it writes, has one place for each of the rank's positions."""
    for writer, _ in mirror.writers:
        found = places.places.get(writer)
        if isinstance(found, Mixes):
            raise following.refused(found)
        if places.is_counted(writer):
            raise _counted(writer)
    for node in mirror.graph.output_node().all_input_nodes:
        found = places.places[node]
        if isinstance(found, Mixes):
            raise following.refused(found)
        if places.looks_like_part(node):
            raise CannotShard(
                "what a graph gives back for each of the rank's positions is made of the sequence",
                f"{node.name} was not, and another graph would take it for a part of the sequence",
                at=node,
                remedy=GIVE_POSITIONS,
            )
        if places.is_counted(node):
            raise _counted(node)


def _counted(node: fx.Node) -> CannotShard:
    return CannotShard(
        "what a graph gives back or keeps does not depend on how many positions a rank has",
        f"{node.name} was made of that number",
        at=node,
        remedy=GIVE_POSITIONS,
    )


def _rewrite_sites(
    unit: Unit, mirror: Mirror, cp: ContextParallel, given: dict[fx.Node, Input], shared: list[Site]
) -> tuple[dict[str, RewrittenSite], int]:
    """What became of the sites, by module, and how many attentions they are now."""
    are_chance = LENGTH in cp.allow
    layout = GraphLayout(size=cp.size, group=cp.group_name, is_balanced=cp.is_balanced)
    builder = GraphBuilder(unit.graph, mirror, unit.mode)
    wholes = Wholes(builder, mirror, layout, given, are_chance=are_chance)
    done: dict[str, RewrittenSite] = {}
    rewritten: dict[str, fx.Node] = {}
    parts: dict[str, int] = {}
    for site in first_look.in_order(mirror, shared):
        unit.current = site.module
        if site.spec is None:
            raise ValueError(f"the site at {site.module} has no spec")
        sites.check(site, site.spec)
        if not are_chance:
            sites.check_scale(site, site.spec)
        if outside.WINDOW not in cp.allow and isinstance(site.spec.seqlen_q, int):
            outside.check_window(mirror, site, site.spec.seqlen_q * cp.size)
        if cp.packed:
            outside.check_documents(site, wholes)
        if cp.is_balanced and isinstance(site.spec.seqlen_q, int) and site.spec.seqlen_q % 2:
            raise CannotShard(
                "a rank has two chunks of the sequence",
                f"{site.spec.seqlen_q} positions",
                at=site.match.out,
                remedy="cut batches by ContextParallel.shard",
            )
        chosen = choosing.choice(site, site.spec, cp, layout, unit.target(site.spec.device))
        is_ring = chosen.method == "ring" and sites.halo_of(site, site.spec, layout, "ring") is None
        with builder.at(site.match.out, with_grad=site.spec.needs_grad) as old:
            with builder.without_autocast():
                if is_ring:
                    out, one = ring.rewrite(mirror, site, builder, layout, wholes)
                else:
                    out, one = sites.rewrite(mirror, site, builder, layout, wholes, chosen.method)
            new = lower.finish(mirror, site, builder, out, old)
        done[site.module], parts[old.name] = (
            dataclasses.replace(one, why=chosen.why, leaves_zero=site.keyless is not None),
            one.parts,
        )
        unread = lower.unread(mirror, site, [builder.leaf(site.match.out)])
        builder.replace(builder.leaf(site.match.out), new)
        rewritten[old.name] = new
        for node in unread:
            unit.graph.erase_node(node)
    builder.erase_unused([])
    unit.graph_module.recompile()
    if unit.first_look is not None:
        unit.first_look = dataclasses.replace(unit.first_look, rewritten=rewritten, parts=parts)
    return done, sum(parts.values())


def _look_again(unit: Unit, expected: int, others: int) -> None:
    """The rewritten graph after matching and recovery."""
    unit.mirror = unit.reader = unit.ways = None
    unit.is_looked_at_again, unit.longer = True, {}
    unit.sites, unit.misses = [], []
    mirror = unit.mirrored()
    match.run(unit, mirror)
    recover.run(unit, mirror)
    if len(unit.misses) > others or len(unit.sites) != expected:
        observed = str(unit.misses[0].reason) if unit.misses else f"{len(unit.sites)} of {expected}"
        raise CannotShard("each rewritten attention is understood again", observed)


def _note_decoding(unit: Unit, found: SlotOutcome, size: int) -> None:
    for site in unit.sites:
        if site.module in found.sent:
            sent = found.sent[site.module]
            how_much = "what it has" if sent is None else _amount(sent)
            said = f"each of {size} ranks attends to the keys that it keeps, and sends {how_much} in each call"
        else:
            said = f"keys of a cache that ranks share are gathered in each call: {found.kept.get(site.module, 'of unknown origin')}"
        site.notes.append(f"context parallel: {said}")


def _amount(sent: int) -> str:
    return f"{sent / 2**20:.1f} MiB" if sent >= 2**20 else f"{sent} bytes"


def _note(unit: Unit, cp: ContextParallel, done: dict[str, RewrittenSite], by_value: str) -> None:
    order = "head-tail" if cp.is_balanced else "contiguous"
    for site in unit.sites:
        one = done.get(site.module)
        if one is None:
            site.notes.append("context parallel: every rank has all of its keys")
            continue
        why = ("" if one.why is None else f"; {one.why}") + by_value
        site.notes.append(
            f"context parallel: {one.words} over {cp.size} ranks, {order} positions, a rank sends {_amount(one.bytes)} in the forward{why}"
        )


__all__ = ["asked", "check_not_left", "longer", "run"]
