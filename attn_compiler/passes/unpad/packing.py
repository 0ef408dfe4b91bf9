"""The packed graph, made on a copy of the model's: all that real tokens need, and outputs unpacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import axes, axis_rules, faults, mutation, views
from attn_compiler.passes.graph.aliasing import Aliases
from attn_compiler.passes.graph.faults import Fault, Log
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.onward import Trial
from attn_compiler.passes.graph.unit import FoundSites, GraphMemory, Unit, module_path, source_line
from attn_compiler.passes.unpad import exits, facts as run_time_facts, masks, packed_sizes, rules, scores, sharing
from attn_compiler.passes.unpad.analysis import PRODUCTS, Analysis
from attn_compiler.passes.unpad.forms import KeepsPadding, Kind, Need, places
from attn_compiler.passes.unpad.making import Maker, Tokens
from attn_compiler.passes.unpad.masks import Padding
from attn_compiler.passes.unpad.outcome import KeptGraph, Packed, fake_inputs
from attn_compiler.passes.unpad.sharing import SharedAnalysis
from attn_compiler.passes.unpad.unpadding import Batch, PackedWork
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import (
    compat as torch_compat,
    frames as torch_frames,
    packed as torch_packed,
    tracing as torch_tracing,
)

#: lowerings that compute no pair of tokens of two rows
LEAVING_OUT = ("rows", "hopper", "triton")


#: positions of the smallest batch whose number of real tokens is a symbol of its own: 0 and 1 are known sizes
_FEWEST = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Before:
    """A unit as it was with its padding."""

    graph: fx.Graph
    memory: GraphMemory
    mirror: Mirror
    found: FoundSites
    faults: tuple[Fault, ...]
    unread: tuple[str, ...]

    @classmethod
    def of(cls, unit: Unit, mirror: Mirror, found: FoundSites) -> Before:
        return cls(
            graph=unit.graph,
            memory=unit.memory,
            mirror=mirror,
            found=found,
            faults=tuple(unit.log.faults),
            unread=tuple(unit.log.unread),
        )

    def beside(self, unit: Unit) -> Unit:
        """Make a separate unit, to be rewritten as any graph whose padding stays. unit: the packed one."""
        return Unit(
            graph_module=torch_packed.with_graph(unit.graph_module, self.graph),
            options=unit.options,
            place=unit.place,
            memory=self.memory,
            log=Log(strict=unit.options.strict),
            spelling=unit.spelling,
            mirror=self.mirror,
            found=self.found,
        )

    def put_back(self, unit: Unit) -> None:
        """Restore the unit, since nothing was packed after all."""
        unit.graph_module.graph = self.graph
        unit.memory, unit.mirror, unit.found = self.memory, self.mirror, self.found
        unit.log.faults[:], unit.log.unread[:] = self.faults, self.unread


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTrial(Trial):
    """A packed graph, which is the unit's for now. packed: the outcome if each attention has its kernel."""

    packed: Packed
    before: Before

    @property
    def among(self) -> tuple[str, ...]:
        return LEAVING_OUT


def pack(unit: Unit, mirror: Mirror, found: FoundSites) -> PackedTrial | None:
    """Take the padding out of the graph. The outcome is why it stays, if it does."""
    shares, unpads = unit.options.share_prefix, unit.options.unpad
    with faults.confined(unit.log, "unpad", unit.name or "the graph") as attempt:
        try:
            _check_graph(unit)
            try:
                return _run(unit, mirror, found, shares, None)
            except KeepsPadding as why:
                if not (shares and unpads):
                    raise
                # Prompts may have to stay for each row where padding need not.
                return _run(unit, mirror, found, False, why.reason)
        except KeepsPadding as why:
            unit.outcome = _kept(mirror, why, shares and not unpads)
    if attempt.reason is not None:
        unit.outcome = KeptGraph(reason=attempt.reason, shares=shares)
    return None


def _kept(mirror: Mirror, kept: KeepsPadding, shares: bool) -> KeptGraph:
    owner = None if kept.at is None else mirror.owner(kept.at)
    module = None if owner is None else module_path(owner)
    source = None if owner is None else source_line(owner)
    return KeptGraph(reason=kept.reason, shares=shares, module=module, source=source)


def _check_graph(unit: Unit) -> None:
    if torch_frames.is_cut_into_buckets():
        raise KeepsPadding(
            Code.PADDING_OTHER_CALLS,
            "padding is taken out of a whole graph",
            "the buckets of DistributedDataParallel cut it",
            remedy="set torch._dynamo.config.optimize_ddp = False",
        )
    rule = "the attentions are calls of the captured graph itself"
    if unit.is_body or unit.place.callees:
        names = unit.name if unit.is_body else ", ".join(body.name for _, body in unit.place.callees)
        remedy = "use no checkpoint within a checkpoint"
        raise KeepsPadding(Code.PADDING_OTHER_CALLS, rule, f"attention is in the body {names}", remedy=remedy)
    if unit.spelling.calls or unit.spelling.local:
        raise KeepsPadding(
            Code.PADDING_OTHER_CALLS, rule, "FlexAttention, a library's kernel, keys in several sets or DTensors"
        )
    if unit.options.fp8_recipe is not None:
        raise KeepsPadding(
            Code.PADDING_OTHER_CALLS, "attention runs in the model's own dtype", "an fp8_recipe is given"
        )


def _run(unit: Unit, mirror: Mirror, found: FoundSites, shares: bool, not_shared: Reason | None) -> PackedTrial:
    padding, pairs = masks.padding_and_pairs(found.sites, _no_padding(mirror, found) if shares else None)
    _unify_sizes(padding, found)
    of_sites = dict(zip(found.sites, pairs, strict=True))
    if shares:
        sharing.check_pairs(of_sites)
    for site, own in zip(found.sites, pairs, strict=True):
        if own.scores is not None:
            scores.check_scores(site, own.scores, mirror, padding.tensor.node)
    analysis = (SharedAnalysis if shares else Analysis)(mirror, padding, of_sites)
    graph = torch_compat.copied_graph(unit.graph)
    copies = dict(zip(unit.graph.nodes, graph.nodes, strict=True))
    maker = Maker(
        analysis=analysis, graph=graph, copies=copies, mode=unit.mode, given=_inputs(unit, graph, analysis, padding)
    )
    try:
        trial = _packed(unit, mirror, found, padding, analysis, maker)
        return dataclasses.replace(trial, packed=dataclasses.replace(trial.packed, not_shared=not_shared))
    except Exception:
        torch_packed.forget_guards([x.meta["example_value"] for x in maker.given.inputs])
        raise


def _packed(
    unit: Unit, mirror: Mirror, found: FoundSites, padding: Padding, analysis: Analysis, maker: Maker
) -> PackedTrial:
    graph = maker.graph
    roots, replaced = _roots(unit, found, maker)
    maker.make(roots)
    zeroed = _put_in(maker, replaced)
    packed_sizes.insert_sizes(unit.graph, maker)
    _erase_unread(unit, maker)
    _check_gone(unit, maker)
    rules.check_once(maker.made, maker.analysis, maker.mirror, maker.erased)
    facts = {word: [analysis.facts[node] for node in nodes] for word, nodes in maker.facts().items()}
    of_mask = [exits.zero_or_one(padding.tensor.node)] if padding.is_asked else []
    asked = [*of_mask, *(fact for same in facts.values() for fact in (same if same[0].needs else same[:1]))]
    windows: tuple[int | None, ...] = ()
    compared = None
    if isinstance(analysis, SharedAnalysis):
        windows, compared = analysis.windows, sharing.compared(maker.made, analysis)
    # Padding that counts is a query without keys, whose result is 0 in both graphs.
    may_count = all(site.keyless is None for site in found.sites)
    counted = [fact for fact in asked if may_count and fact.counts is not None]
    asked = [*(fact for fact in asked if fact not in counted), *([exits.LEADS] if counted else [])]
    before = run_time_facts.graph(unit.graph_module, mirror, padding, asked, counted, compared)
    original = torch_packed.copied(unit.graph_module)
    dropout, given_back = rules.is_drawn(maker.made, maker.analysis, maker.mirror), _places(unit, maker, replaced)
    packed = Packed(
        facts=(*(fact.words for fact in asked), *(_shared_facts(found) if windows else ())),
        zeroed=() if windows else zeroed,
        places={} if windows else given_back,
        writes=bool(mirror.writers),
        dropout=dropout,
        before=before,
        original=original,
        work=_work(maker, found),
        fakes=tuple(x.meta["example_value"] for x in original.graph.find_nodes(op="placeholder")),
        mode=unit.mode,
        most=_most(analysis),
        inputs=tuple(x.meta["example_value"] for x in maker.given.inputs),
        windows=windows,
    )
    trial = PackedTrial(packed=packed, before=Before.of(unit, mirror, found))
    unit.graph_module.graph, unit.memory = graph, GraphMemory(aliases=Aliases(graph=graph))
    return trial


def _inputs(unit: Unit, graph: fx.Graph, analysis: Analysis, padding: Padding) -> Tokens:
    """Add placeholders for the places of real tokens behind those of the model."""
    mask = padding.tensor.node.meta["val"]
    most = _most(analysis)
    if most is not None and most < _FEWEST:
        raise KeepsPadding(Code.PADDING_SIZES, f"a batch has at least {_FEWEST} positions", f"{most}")
    with torch_tracing.running_in(unit.mode):
        windows = analysis.windows if isinstance(analysis, SharedAnalysis) else ()
        positions = mask.shape[0] * mask.shape[1] if windows else None
        like = Batch.like(2, mask.shape[0], mask.device, positions=positions, windows=len(windows))
    last = list(graph.find_nodes(op="placeholder"))[-1]
    made = {}
    names = [each.name for each in dataclasses.fields(Tokens)]
    # A typical number of tokens, for choices; odd, so that nothing is found to divide it.
    expected = max(_FEWEST, (most or 8192) * 5 // 8 | 1)
    for name, value in zip(names, fake_inputs(unit.mode, most, expected, like, len(windows)), strict=False):
        with graph.inserting_after(last):
            last = graph.placeholder(f"unpadded_{name}")
        last.meta["example_value"] = value
        torch_packed.mark_own_input(last)
        made[name] = last
    return Tokens(**made)


def _unify_sizes(padding: Padding, found: FoundSites) -> None:
    """Guard that the mask has as many rows as the queries: a model that reads it by computed rows does not ask for that."""
    mask = views.value(padding.tensor.node)
    for site in found.sites:
        q = site.match.anchor.args[0]
        if isinstance(q, fx.Node) and mask.dim() == 2 and views.value(q).dim() == 4:
            axes.unify(mask.shape[0], views.value(q).shape[0])


def _shared_facts(found: FoundSites) -> tuple[str, ...]:
    needs_keys = any(site.keyless is not None for site in found.sites)
    return sharing.FACTS if needs_keys else sharing.FACTS[:1]


def _no_padding(mirror: Mirror, found: FoundSites) -> Padding:
    """Return the padding of a graph without any: an input of rows and positions tells the sizes."""
    anchors = [site.match.anchor for site in found.sites]
    q = anchors[0].args[0] if anchors else None
    shape = axes.shape_exprs(views.value(q)) if isinstance(q, fx.Node) else ()
    for node in mirror.graph.find_nodes(op="placeholder"):
        x = node.meta.get("val")
        own = axes.shape_exprs(x) if isinstance(x, torch.Tensor) else ()
        if len(shape) == 4 and own == (shape[0], shape[2]) and mirror.dynamo_node(node) is not None:
            return Padding(tensor=Version(node=node), negated=False, is_absent=True)
    remedy = "compile the whole model as one graph, and pass input_ids"
    raise KeepsPadding(Code.PADDING_MASK, "an input is of (rows, positions)", "the graph has none", remedy=remedy)


def _most(analysis: Analysis) -> int | None:
    rows, positions = analysis.sizes
    return int(rows) * int(positions) if rows.is_Integer and positions.is_Integer else None


def _roots(unit: Unit, found: FoundSites, maker: Maker) -> tuple[list[Need], dict[fx.Node, Need]]:
    """Return the forms that have to be made, and the Dynamo nodes that they replace."""
    replaced: dict[fx.Node, Need] = {}
    given_back = set(unit.graph.output_node().all_input_nodes)
    for dynamo in unit.graph.nodes:
        node = maker.value_of(dynamo)
        if node is None:
            continue
        value = maker.analysis.value(node)
        if dynamo in given_back and value.lost is not None:
            raise value.lost
        if dynamo in given_back and value.kind is Kind.PACKED:
            _check_no_cache(found, node)
            replaced[dynamo] = Need(node, "unpacked")
        elif value.kind is Kind.RETURNED and not maker.is_kept(node) and value.several is None:
            replaced[dynamo] = Need(node, "plain")
    needed = {d: need for d, need in replaced.items() if d in given_back or not replaced.keys() >= d.users.keys()}
    return list(needed.values()), needed


def _check_no_cache(found: FoundSites, node: fx.Node) -> None:
    operands = {x for site in found.sites for x in site.match.anchor.args[1:3] if isinstance(x, fx.Node)}
    if mutation.storages(node) & set().union(*map(mutation.storages, operands)):
        raise KeepsPadding(
            Code.PADDING_CACHE,
            "no cache of keys and values is given back",
            node.name,
            at=node,
            remedy="call the model with use_cache=False",
        )


def _put_in(maker: Maker, replaced: Mapping[fx.Node, Need]) -> tuple[str, ...]:
    """Replace the model's own nodes by those that were made. Returns the outputs that are 0 at padding."""
    output = maker.graph.output_node()
    zeroed = []
    for dynamo, need in replaced.items():
        copy, new = maker.copies[dynamo], maker.made[need]
        if need.form == "unpacked":
            output.replace_input_with(copy, new)
            shape = ", ".join(str(size) for size in new.meta["example_value"].shape)
            zeroed.append(f"{dynamo.name} ({shape})")
        else:
            copy.replace_all_uses_with(new)
    return tuple(zeroed)


def _work(maker: Maker, found: FoundSites) -> PackedWork:
    """Return the work of a call. Sizes that are not known count for nothing."""
    packed = {need.node for need in maker.made if need.form == "packed" and not maker.is_padded(need.node, maker.made)}
    weights = [
        x.meta["val"].numel()
        for node in packed
        if axis_rules.line_of(node) in PRODUCTS
        for x in node.all_input_nodes
        if x not in packed and x.meta["val"].dim() == 2
    ]
    specs = [site.spec for site in found.sites if site.spec is not None]
    widths = [(spec.num_heads_q, spec.head_dim_qk) for spec in specs]
    pairs = [2 * heads * dim for heads, dim in widths if isinstance(heads, int) and isinstance(dim, int)]
    products = [number for number in weights if isinstance(number, int)]
    return PackedWork(products=sum(products), pairs=sum(pairs), sites=len(found.sites))


def _places(unit: Unit, maker: Maker, replaced: Mapping[fx.Node, Need]) -> dict[int, tuple[int, int]]:
    """Return the axes of rows and positions of each output that is unpacked."""
    given: Any = unit.graph.output_node().args[0]
    found = {}
    for place, node in enumerate(given if isinstance(given, (tuple, list)) else (given,)):
        need = replaced.get(node) if isinstance(node, fx.Node) else None
        if need is not None and need.form == "unpacked":
            dims = maker.analysis.value(need.node).dims
            (rows,), (positions,) = (places(dims, atom) for atom in (maker.analysis.batch, maker.analysis.seq))
            found[place] = (rows, positions)
    return found


def _erase_unread(unit: Unit, maker: Maker) -> None:
    """Erase the model's own nodes whose values nothing reads any more."""
    for dynamo in reversed(list(unit.graph.nodes)):
        if dynamo in maker.erased:
            continue
        copy = maker.copies[dynamo]
        is_call = dynamo.op in ("call_function", "call_method") and dynamo.meta.get("example_value") is not None
        if is_call and not copy.users and _only_computes(maker.mirror, dynamo):
            maker.graph.erase_node(copy)
            maker.erased.add(dynamo)
    made = set(maker.copies.values())
    for node in reversed(list(maker.graph.nodes)):
        if node not in made and node.op == "call_function" and not node.users:
            maker.graph.erase_node(node)


def _only_computes(mirror: Mirror, dynamo: fx.Node) -> bool:
    """Return `Mirror.computes_only`, also for nodes that compute numbers from sizes."""
    owned = mirror.owned(dynamo)
    return all(
        (isinstance(n.target, torch._ops.OpOverload) or getattr(n.target, "__module__", "") == "_operator")
        and not mutation.writes(n)
        for n in owned
    )


def _check_gone(unit: Unit, maker: Maker) -> None:
    """Raise KeepsPadding if a packed value is still computed with padding: an opaque node reads it."""
    for dynamo in unit.graph.nodes:
        if dynamo in maker.erased or dynamo.op == "output":
            continue
        if maker.kind_of(dynamo) in (Kind.PACKED, Kind.LOST):
            node = maker.value_of(dynamo)
            lost = None if node is None else maker.analysis.value(node).lost
            users = ", ".join(user.name for user in maker.copies[dynamo].users) or "nothing"
            raise lost or KeepsPadding(
                Code.PADDING_OUT_OF_REACH,
                "what reads packed tokens is looked into",
                f"{dynamo.name}, read by {users}",
                at=node,
            )
