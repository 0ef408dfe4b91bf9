"""The rewriting of every attention of a graph, for the whole sequence or for the cache that ranks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from attn_compiler.context_parallel import ContextParallel, rank_sync
from attn_compiler.passes.context_parallel import (
    agreement,
    caches,
    choosing,
    decoding,
    first_look,
    following,
    lost_masks,
    ring,
    sites,
    wrapped,
)
from attn_compiler.passes.context_parallel.agreement import SequenceRewrite, SlotRewrite, Spread, as_user_error
from attn_compiler.passes.context_parallel.compared import NotComparable, compare
from attn_compiler.passes.context_parallel.decoding import SlotOutcome, note_decoding
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.context_parallel.first_look import FirstLook
from attn_compiler.passes.context_parallel.following import Following, Input
from attn_compiler.passes.context_parallel.numbers import LENGTH
from attn_compiler.passes.context_parallel.places import GIVE_POSITIONS, CannotShard, Mixes
from attn_compiler.passes.context_parallel.sites import RewrittenSite
from attn_compiler.passes.context_parallel.whole import Wholes
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.aliasing import Aliases
from attn_compiler.passes.graph.emit import GraphBuilder
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Miss, Site
from attn_compiler.passes.graph.unit import FoundSites, GraphMemory, Unit
from attn_compiler.passes.recovering.reading.readers import Readers
from attn_compiler.passes.writing import lower
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import frames as torch_frames

#: a name in ContextParallel(allow=...) that is no op
GRAPH_BREAK = "graph_break"


def asked(unit: Unit) -> ContextParallel | None:
    """Return the user's ContextParallel, if there are several ranks and each has a part of the sequence.

    None also where keys come from a cache that ranks share: every rank then gets all new tokens and sees all keys.
    """
    found = unit.options.context_parallel
    return None if found is None or found.size == 1 or unit.shares_cache else found


def note_lengths(unit: Unit, readers: Readers) -> None:
    """Tell readers of masks the length of the whole sequence. Raises ContextParallelUnsupported."""
    cp = asked(unit)
    if cp is None:
        return
    try:
        lengths = {one.length for one in following.inputs(unit.graph, cp.replicated).values()}
    except CannotShard as cannot:
        raise as_user_error(None, None, cannot.reason) from None
    readers.longer[unit] = {length: length * cp.size for length in lengths}


def check_not_left(units: Sequence[Unit]) -> None:
    """Raise ContextParallelUnsupported if the passes left a graph alone."""
    for unit in units:
        if unit.log.left_alone is not None and asked(unit) is not None:
            raise as_user_error(unit.mirror, None, unit.log.left_alone)


def spread(
    unit: Unit, mirror: Mirror, found: FoundSites, targets: Mapping[str, Target], readers: Readers
) -> Spread | None:
    """Rewrite every attention of the graph; None where ranks have nothing to agree on.

    An attention that can't be rewritten, or another op that mixes positions, is an error, which is raised when all ranks know of it.
    """
    cp, shares_cache = unit.options.context_parallel, unit.shares_cache
    if cp is None or cp.size == 1:
        if shares_cache:
            note_decoding(found, SlotOutcome(kept={site.module: decoding.NO_OPTION for site in found.sites}), 1)
        return None
    # The groups are read before the rewrite, which may fail halfway.
    beside = () if shares_cache else _groups_beside(unit, cp)
    made = Spread(cp=cp, beside=beside, mirror=mirror, call=tuple(agreement.call_facts(unit.graph)))
    try:
        made = dataclasses.replace(
            made,
            rewrite=_decoding(unit, mirror, found, cp)
            if shares_cache
            else _rewritten(unit, mirror, found, targets, cp, beside),
        )
    except Exception as error:  # noqa: BLE001 (the others are not to wait for a rank that has failed: agreement.py raises it)
        made = dataclasses.replace(made, error=error)
    if made.is_other_graph:
        unit.memory = GraphMemory(aliases=Aliases(graph=unit.graph))
        readers.longer.pop(unit, None)
    return made


def _decoding(unit: Unit, mirror: Mirror, found: FoundSites, cp: ContextParallel) -> SlotRewrite:
    outcome, look = decoding.rewrite(unit, mirror, found.sites, cp)
    return SlotRewrite(sites=len(found.sites), misses=len(found.misses), look=look, outcome=outcome)


def _groups_beside(unit: Unit, cp: ContextParallel) -> tuple[str, ...]:
    """Return the groups of ranks that have the same part of the sequence, and other heads."""
    try:
        given = following.inputs(unit.graph, cp.replicated)
    except CannotShard:
        # `_rewritten` raises the same, which depends on sizes alone.
        return ()
    return tuple(group for group in wrapped.groups(unit.graph, given) if group != cp.group_name)


def _rewritten(
    unit: Unit,
    mirror: Mirror,
    found: FoundSites,
    targets: Mapping[str, Target],
    cp: ContextParallel,
    beside: tuple[str, ...],
) -> SequenceRewrite:
    if not unit.is_body:
        _check_frame(unit, cp)
    given = following.inputs(unit.graph, cp.replicated)
    compared, by_value = None, ""
    difference: CannotShard | None = None
    if not unit.is_body and LENGTH not in cp.allow:
        try:
            compared = compare(unit, mirror, cp, given)
        except CannotShard as cannot:
            # Errors found in the rank's own program come first.
            difference = cannot
        except NotComparable as error:
            by_value = f"; numbers of the length were looked for by their values alone: {error}"
    places = Following(
        mirror,
        given,
        found.sites,
        cp.allow,
        rank_sync.ranks_of(cp.group_name),
        None if compared is None else compared.differing_axes,
    )
    others = [miss for miss in found.misses if places.holds_still(miss.anchor)]
    _check_found(unit, found, others)
    for site in found.sites:
        caches.check_uncached(mirror, site, cp.replicated)
    shared = [site for site in found.sites if _is_shared(places, site, cp)]
    _check_outputs(mirror, places)
    look = None
    if unit.options.verify:
        look = FirstLook(
            cp=cp,
            beside=beside,
            mirror=mirror,
            original=first_look.runnable_copy(unit.graph),
            sites=tuple(first_look.in_order(mirror, found.sites)),
            axes={node.name: one.axis for node, one in given.items()},
        )
    done = _rewrite_sites(unit, mirror, targets, cp, given, shared)
    if difference is not None:
        raise difference
    parts = {one.old: one.site.parts for one in done}
    if look is not None:
        look = dataclasses.replace(look, rewritten={one.old: one.new for one in done}, parts=parts)
    return SequenceRewrite(
        sites=len(found.sites) - len(shared) + sum(parts.values()),
        misses=len(others),
        look=look,
        shared=len(shared),
        lengths=tuple(sorted({one.length for one in given.values()})),
        done={one.module: one.site for one in done},
        by_value=by_value,
    )


@dataclass(frozen=True, kw_only=True)
class _Done:
    """A rewritten site. module: of the site. old: the name of its output. new: the output's replacement."""

    module: str
    old: str
    new: fx.Node
    site: RewrittenSite


def _check_frame(unit: Unit, cp: ContextParallel) -> None:
    """Raise CannotShard if anything of the model runs outside of graphs, now or after some more lengths."""
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


def _check_found(unit: Unit, found: FoundSites, others: list[Miss]) -> None:
    """Raise CannotShard if something that looks like attention was not understood. others: misses within each position (a router)."""
    rule = "every attention of the graph is understood"
    for miss in (miss for miss in found.misses if miss not in others):
        raise CannotShard(rule, str(miss.reason), at=miss.anchor)
    for call, reason in found.untried.items():
        raise CannotShard(rule, f"{call.name}: {reason}", at=None)
    if unit.spelling.calls:
        raise CannotShard(
            rule,
            "FlexAttention, a library's kernel or keys in several sets",
            remedy='load the model with attn_implementation="sdpa"',
        )
    if unit.is_body or unit.place.callees:
        raise CannotShard(
            "attention stands in the graph itself, or in a checkpoint",
            "it is in the body of a higher-order call, such as a checkpoint in a checkpoint",
            remedy="compile each layer by itself, and call the compiled layers there",
        )
    if unit.options.fp8_recipe is not None:
        raise CannotShard("attention runs in the model's own dtype", "an fp8_recipe is given")


def _is_shared(places: Following, site: Site, cp: ContextParallel) -> bool:
    """Return whether the keys of a site are on several ranks. Raises CannotShard where that is unknown, or can't be rewritten."""
    found = site.match
    of_q = places.sequence_of(found.q.node, found.q.dims, found.axes.query)
    of_k = places.sequence_of(found.k.node, found.k.dims, found.axes.key)
    of_v = places.sequence_of(found.v.node, found.v.dims, found.axes.key)
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
    """Return whether k and v come from the model itself, or from inputs that every rank has. is_q_too: and q."""
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
    # If the model has as many own keys as the rank has positions, it takes as many as there are positions.
    return bool(named) or (
        not is_q_too and axes.dim_size(site.match.axes.key) not in {atom.size for atom in places.atoms}
    )


def _check_outputs(mirror: Mirror, places: Following) -> None:
    """Raise CannotShard if an output or a write of the graph mixes positions, or depends on their number."""
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
    unit: Unit,
    mirror: Mirror,
    targets: Mapping[str, Target],
    cp: ContextParallel,
    given: dict[fx.Node, Input],
    shared: list[Site],
) -> list[_Done]:
    are_chance = LENGTH in cp.allow
    layout = GraphLayout(size=cp.size, group=cp.group_name, is_balanced=cp.is_balanced)
    builder = GraphBuilder(unit.graph, mirror, unit.mode)
    wholes = Wholes(builder, mirror, layout, given, are_chance=are_chance)
    done: list[_Done] = []
    for site in first_look.in_order(mirror, shared):
        unit.log.current = site.module
        if site.spec is None:
            raise ValueError(f"the site at {site.module} has no spec")
        sites.check_shareable(site, site.spec)
        if not are_chance:
            sites.check_scale(site, site.spec)
        if lost_masks.WINDOW not in cp.allow and isinstance(site.spec.seqlen_q, int):
            lost_masks.check_window(mirror, site, site.spec.seqlen_q * cp.size)
        if cp.packed:
            lost_masks.check_documents(site, wholes)
        if cp.is_balanced and isinstance(site.spec.seqlen_q, int) and site.spec.seqlen_q % 2:
            raise CannotShard(
                "a rank has two chunks of the sequence",
                f"{site.spec.seqlen_q} positions",
                at=site.match.out,
                remedy="cut batches by ContextParallel.shard",
            )
        chosen = choosing.choice(site, site.spec, cp, layout, targets[site.spec.device])
        is_ring = chosen.method == "ring" and sites.halo_of(site, site.spec, layout, "ring") is None
        with builder.at(site.match.out, with_grad=site.spec.needs_grad) as old:
            with builder.without_autocast():
                if is_ring:
                    out, one = ring.rewrite(mirror, site, builder, layout, wholes)
                else:
                    out, one = sites.rewrite(mirror, site, builder, layout, wholes, chosen.method)
            new = lower.finish(mirror, site, builder, out, old)
        one = dataclasses.replace(one, why=chosen.why, leaves_zero=site.keyless is not None)
        done.append(_Done(module=site.module, old=old.name, new=new, site=one))
        unread = lower.unread(mirror, site, [builder.leaf(site.match.out)])
        builder.replace(builder.leaf(site.match.out), new)
        for node in unread:
            unit.graph.erase_node(node)
    builder.erase_unused([])
    unit.graph_module.recompile()
    return done
