"""Padding that is never computed (`options={"unpad": True}`): real tokens are packed, and outputs are unpacked with 0 at padding.

masks.py: what all attentions leave out. scores.py: what joins their scores. analysis.py: in which forms each value can be had, by rules.py
(what commutes with packing) and exits.py (where padding does not count). making.py: the nodes. facts.py: what is asked before each step.
The new graph is made on a copy, and is looked at by the same passes as any: all of it takes the place of the model's, or nothing does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.passes.graph import faults, mutation
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.unit import Unit, module_path, source_line
from attn_compiler.passes.matching import match
from attn_compiler.passes.recovering import recover
from attn_compiler.passes.unpad import asked_sizes, drawing, facts as run_time_facts, masks, scores
from attn_compiler.passes.unpad.analysis import Analysis
from attn_compiler.passes.unpad.making import Maker, Tokens
from attn_compiler.passes.unpad.masks import Padding
from attn_compiler.passes.unpad.outcome import KeptGraph, Outcome, Packed, fake_inputs
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.passes.unpad.values import Kind, Need, places
from attn_compiler.passes.writing import select
from attn_compiler.reasons.codes import Code
from attn_compiler.torch_private import (
    compat as torch_compat,
    frames as torch_frames,
    packed as torch_packed,
    tracing as torch_tracing,
)

#: lowerings that compute no pair of tokens of two rows
LEAVING_OUT = ("rows", "hopper", "triton")


def run(unit: Unit, mirror: Mirror) -> None:
    """Take the padding out of the graph, or say why it stays."""
    if not unit.options.unpad:
        return
    with faults.confined(unit, "unpad", unit.name or "the graph") as attempt:
        try:
            _check_graph(unit)
            unit.unpadded = _run(unit, mirror)
        except KeepsPadding as kept:
            unit.unpadded = _kept(mirror, kept)
    if attempt.reason is not None:
        unit.unpadded = KeptGraph(reason=attempt.reason)


def _kept(mirror: Mirror, kept: KeepsPadding) -> KeptGraph:
    owner = None if kept.at is None else mirror.owner(kept.at)
    module = None if owner is None else module_path(owner)
    return KeptGraph(reason=kept.reason, module=module, source=None if owner is None else source_line(owner))


def _check_graph(unit: Unit) -> None:
    if torch_frames.is_cut_into_buckets():
        raise KeepsPadding(
            Code.PADDING_OTHER_CALLS,
            "padding is taken out of a whole graph",
            "the buckets of DistributedDataParallel cut it",
            remedy="set torch._dynamo.config.optimize_ddp = False",
        )
    rule = "the attentions are calls of the captured graph itself"
    if unit.is_body:
        remedy = "train without gradient checkpointing"
        raise KeepsPadding(Code.PADDING_OTHER_CALLS, rule, f"attention is in the body {unit.name}", remedy=remedy)
    if unit.callees:
        names = ", ".join(body.name for _, body in unit.callees)
        raise KeepsPadding(
            Code.PADDING_OTHER_CALLS,
            rule,
            f"attention is in the body {names}",
            remedy="train without gradient checkpointing",
        )
    if unit.spelled or unit.local:
        raise KeepsPadding(Code.PADDING_OTHER_CALLS, rule, "FlexAttention, a library's kernel or DTensors")
    if unit.options.fp8_recipe is not None:
        raise KeepsPadding(
            Code.PADDING_OTHER_CALLS, "attention runs in the model's own dtype", "an fp8_recipe is given"
        )


def _run(unit: Unit, mirror: Mirror) -> Packed:
    padding, pairs = masks.of(unit.sites)
    for site, own in zip(unit.sites, pairs, strict=True):
        if own.scores is not None:
            scores.check(site, own.scores, mirror, padding.tensor.node)
    analysis = Analysis(mirror, padding, dict(zip(unit.sites, pairs, strict=True)))
    graph = torch_compat.copied_graph(unit.graph)
    copies = dict(zip(unit.graph.nodes, graph.nodes, strict=True))
    maker = Maker(
        analysis=analysis, graph=graph, copies=copies, mode=unit.mode, given=_inputs(unit, graph, analysis, padding)
    )
    try:
        return _packed(unit, mirror, padding, analysis, maker)
    except Exception:
        torch_packed.forget_guards([x.meta["example_value"] for x in vars(maker.given).values()])
        raise


def _packed(unit: Unit, mirror: Mirror, padding: Padding, analysis: Analysis, maker: Maker) -> Packed:
    graph = maker.graph
    roots, replaced = _roots(unit, maker)
    maker.make(roots)
    zeroed = _put_in(unit, maker, replaced)
    asked_sizes.put_in(unit.graph, maker)
    _erase_unread(unit, maker)
    _check_gone(unit, maker)
    drawing.check_once(maker)
    found = {word: [analysis.facts[node] for node in nodes] for word, nodes in maker.facts().items()}
    asked = [fact for same in found.values() for fact in (same if same[0].needs else same[:1])]
    before = run_time_facts.graph(unit.graph_module, mirror, padding, asked)
    original = fx.GraphModule(unit.graph_module, torch_compat.copied_graph(unit.graph))
    dropout, given_back = drawing.is_drawn(maker), _places(unit, maker, replaced)
    trial = _looked_at(unit, graph)
    _take(unit, trial, graph)
    return Packed(
        facts=tuple(fact.words for fact in asked),
        zeroed=zeroed,
        places=given_back,
        writes=bool(mirror.writers),
        dropout=dropout,
        before=before,
        original=original,
        fakes=tuple(x.meta["example_value"] for x in original.graph.find_nodes(op="placeholder")),
        mode=unit.mode,
        most=_most(analysis),
        inputs=tuple(x.meta["example_value"] for x in vars(maker.given).values()),
    )


def _inputs(unit: Unit, graph: fx.Graph, analysis: Analysis, padding: Padding) -> Tokens:
    """Placeholders for where the real tokens are, behind those of the model."""
    mask = padding.tensor.node.meta["val"]
    most = _most(analysis)
    with torch_tracing.running_in(unit.mode):
        starts = torch.empty(mask.shape[0] + 1, dtype=torch.int64, device=mask.device)
    last = list(graph.find_nodes(op="placeholder"))[-1]
    made = {}
    names = [each.name for each in dataclasses.fields(Tokens)]
    for name, value in zip(names, fake_inputs(unit.mode, most, _expected(most), starts), strict=True):
        with graph.inserting_after(last):
            last = graph.placeholder(f"unpadded_{name}")
        last.meta["example_value"] = value
        torch_packed.mark_own_input(last)
        made[name] = last
    return Tokens(**made)


def _most(analysis: Analysis) -> int | None:
    """Tokens that a batch has at most, if its sizes are known."""
    sizes = [atom.size for atom in (analysis.batch, analysis.seq)]
    return int(sizes[0]) * int(sizes[1]) if all(size.is_Integer for size in sizes) else None


def _expected(most: int | None) -> int:
    """A number of real tokens that choices may go by: an odd one, so that nothing is found to divide it."""
    return max(3, (most or 8192) * 5 // 8 | 1)


def _roots(unit: Unit, maker: Maker) -> tuple[list[Need], dict[fx.Node, Need]]:
    """What has to be made, and the Dynamo nodes that it takes the place of."""
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
            _check_no_cache(unit, node)
            replaced[dynamo] = Need(node, "unpacked")
        elif value.kind is Kind.RETURNED and not maker.is_kept(node) and value.several is None:
            replaced[dynamo] = Need(node, "plain")
    needed = {d: need for d, need in replaced.items() if d in given_back or _is_read(dynamo=d, replaced=replaced)}
    return list(needed.values()), needed


def _is_read(dynamo: fx.Node, replaced: Mapping[fx.Node, Need]) -> bool:
    """Whether anything reads it but calls that are made anew, too."""
    return any(user not in replaced for user in dynamo.users)


def _check_no_cache(unit: Unit, node: fx.Node) -> None:
    operands = {x for site in unit.sites for x in site.match.anchor.args[1:3] if isinstance(x, fx.Node)}
    if mutation.storages(node) & set().union(*map(mutation.storages, operands)):
        raise KeepsPadding(
            Code.PADDING_CACHE,
            "no cache of keys and values is given back",
            node.name,
            at=node,
            remedy="call the model with use_cache=False",
        )


def _put_in(unit: Unit, maker: Maker, replaced: Mapping[fx.Node, Need]) -> tuple[str, ...]:
    """Let what was made take the place of the model's own. Gives the outputs that are 0 at padding."""
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


def _places(unit: Unit, maker: Maker, replaced: Mapping[fx.Node, Need]) -> dict[int, tuple[int, int]]:
    """The axes of rows and positions of each output that is unpacked."""
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
    """Erase the model's own nodes that only compute what nothing reads any more."""
    for dynamo in reversed(list(unit.graph.nodes)):
        if dynamo in maker.erased:
            continue
        copy = maker.copies[dynamo]
        is_call = dynamo.op in ("call_function", "call_method")
        if is_call and not copy.users and _only_computes(maker.mirror, dynamo) and _has_value(dynamo):
            maker.graph.erase_node(copy)
            maker.erased.add(dynamo)
    made = set(maker.copies.values())
    for node in reversed(list(maker.graph.nodes)):
        if node not in made and node.op == "call_function" and not node.users:
            maker.graph.erase_node(node)


def _only_computes(mirror: Mirror, dynamo: fx.Node) -> bool:
    """As `Mirror.computes_only`, and numbers that are computed of sizes."""
    owned = mirror.owned(dynamo)
    return all(
        (isinstance(n.target, torch._ops.OpOverload) or getattr(n.target, "__module__", "") == "_operator")
        and not mutation.writes(n)
        for n in owned
    )


def _has_value(dynamo: fx.Node) -> bool:
    return dynamo.meta.get("example_value") is not None


def _check_gone(unit: Unit, maker: Maker) -> None:
    """Nothing that is packed is computed beside it: what is left of it is read by something that was not looked into."""
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


def _looked_at(unit: Unit, graph: fx.Graph) -> Unit:
    """The packed graph after matching and recovery, each attention decided for. Raises KeepsPadding where one has no kernel that leaves
    other rows out."""
    trial = Unit(
        graph_module=fx.GraphModule(unit.graph_module, graph),
        name=unit.name,
        options=unit.options,
        mode=unit.mode,
        targets=unit.targets,
    )
    trial.lowerings = LEAVING_OUT
    made = trial.mirrored()
    match.run(trial, made)
    recover.run(trial, made)
    select.run(trial, made)
    for site in trial.sites:
        decision = site.decision
        if decision is None or decision.lowering == UNTOUCHED:
            said = "; ".join(f"{r.lowering}: {r.reasons[0]}" for r in decision.refusals) if decision else "none"
            raise KeepsPadding(Code.PADDING_NO_KERNEL, "a kernel leaves out pairs of tokens of two rows", said)
    if len(trial.sites) != len(unit.sites):
        raise KeepsPadding(
            Code.PADDING_NO_KERNEL, "each packed attention is understood", f"{len(trial.sites)} of {len(unit.sites)}"
        )
    return trial


def _take(unit: Unit, trial: Unit, graph: fx.Graph) -> None:
    """The packed graph is the unit's from here on."""
    unit.graph_module.graph = graph
    unit.mirror, unit.sites, unit.misses = trial.mirror, trial.sites, trial.misses
    unit.reader, unit.ways, unit.lowerings = trial.reader, trial.ways, trial.lowerings
    unit.untried.clear()
    unit.unread.extend(trial.unread)
    unit.faults.extend(trial.faults)


__all__ = ["KeptGraph", "Outcome", "Packed", "run"]
