"""The checks of the first call, prepared before the graph is given away: copies, and the needs of each check."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attn_compiler.passes import Rewritten
from attn_compiler.passes.graph import axes, mutation
from attn_compiler.passes.graph.first_look import FirstLook, SharedGraph
from attn_compiler.passes.graph.padding_outcome import Packed
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.torch_private import compat as torch_compat, packed as torch_packed
from attn_compiler.verifying import comparing, pairs
from attn_compiler.verifying.checks import Check
from attn_compiler.verifying.copies import copied_module
from attn_compiler.verifying.ranks import Ranks, WholeLoads
from attn_compiler.verifying.shared import SharedSite
from attn_compiler.verifying.values import Body, Key, Values


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """A graph without padding: outputs at padding are 0 on both sides of a comparison.

    before: computes from the graph's inputs the tokens that it computes, (B, S). places: for each output with padding the axes of rows and
    positions, or twice the one that holds both.
    """

    before: fx.GraphModule
    places: Mapping[int, tuple[int, int]]

    def cleared(self, found: Mapping[int, Any], inputs: Sequence[Any]) -> dict[int, Any]:
        """Set tensors to 0 at padding, by the place of their output."""
        with torch.no_grad():
            real = self.before(*inputs)[0]
        return {
            i: _cleared(x, real, self.places[i]) if i in self.places and isinstance(x, torch.Tensor) else x
            for i, x in found.items()
        }


def _cleared(x: torch.Tensor, real: torch.Tensor, places: tuple[int, int]) -> torch.Tensor:
    rows, positions = places
    shape = [1] * x.dim()
    shape[rows] = real.shape[0]
    shape[positions] = real.shape[1]
    if rows == positions:
        shape[rows] = real.numel()
    elif rows > positions:
        real = real.t()
    return torch.where(real.reshape(shape), x, torch.zeros((), dtype=x.dtype, device=x.device))


@dataclass(kw_only=True, eq=False)
class CheckPlan:
    """graph: its name in the report. module: the model's own graph. bodies: by graph module of `module`. checks: in order.

    symbols: name of a symbolic size -> (body, node, dimension) of a value that has it; the dimension is None for a number. inputs: names
    for people. may_write: for each input, True if something in the graph may write to it. devices: of the values. communicates: with other
    processes. rounded: the coarsest dtype in it. strict: a check that fails itself raises. padded: the padding, if the graph leaves it out.
    ranks: those that share the sequence, if several do. has_linear: lowerings replace functions of linear attention.
    """

    graph: str
    module: fx.GraphModule
    inputs: list[str]
    may_write: list[bool]
    devices: tuple[torch.device, ...]
    communicates: bool
    rounded: torch.dtype | None
    strict: bool
    bodies: dict[fx.Graph, Body] = field(default_factory=dict)
    mirrors: dict[fx.Graph, Body] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    symbols: dict[tuple[fx.Graph, str], list[tuple[str, int | None]]] = field(default_factory=dict)
    padded: Padded | None = None
    ranks: Ranks | None = None
    has_linear: bool = False

    def gradient_checks(self) -> list[Check]:
        """Return a gradient check for each site."""
        outs = [check for check in self.checks if check.subject == "output"]
        made = [Check(subject="gradient", site=c.site, body=c.body, new_out=c.new_out) for c in outs]
        for check in made:
            check.find_needs(Values(bodies=self.mirrors))
        return made


def prepare(gm: fx.GraphModule, rewritten: Rewritten) -> CheckPlan | None:
    """Plan the checks of a rewritten graph that is about to be given away; None if it has no site, and no linear attention."""
    if rewritten.failed or not (rewritten.report.linear or any(unit.found.sites for unit in rewritten.units)):
        return None
    if rewritten.packed is not None:
        return _packed_plan(gm, rewritten, rewritten.packed)
    graphs = {u.graph_module: graph for u, graph in zip(rewritten.units, rewritten.originals, strict=True)}
    if rewritten.snapshot is not None and rewritten.report.linear:
        # Graphs without softmax attention may call linear attention.
        graphs = {module: rewritten.snapshot.graph(module) for module in torch_compat.graph_modules(gm)} | graphs
    graphs |= {u.graph_module: look.original for u in rewritten.units if (look := _look(u)) is not None}
    # A graph without attention is unchanged; masks of bodies that it calls may have been read in it.
    units = _with_callers(rewritten.units)
    for unit in units:
        if unit.graph_module not in graphs:
            graphs[unit.graph_module] = torch_compat.copied_graph(unit.graph)
    module = copied_module(gm, graphs)
    mirrored = [unit for unit in units if unit.mirror is not None]
    made = {unit: _body(index, unit, graphs[unit.graph_module]) for index, unit in enumerate(mirrored)}
    for unit, body in made.items():
        body.given |= _given(unit, made)
    bodies = {graphs[unit.graph_module]: body for unit, body in made.items()}
    mirrors = {body.mirror.graph: body for body in made.values()}
    ranks = next((Ranks.from_look(look) for unit in units if (look := _look(unit)) is not None), None)
    checks = [check for unit, body in made.items() for check in _checks(unit, body, ranks)]
    for check in checks:
        check.find_needs(Values(bodies=mirrors))
    plan = _plan(gm, rewritten, module, _may_write(module, bodies), communicates=ranks is not None)
    return dataclasses.replace(
        plan, bodies=bodies, mirrors=mirrors, checks=checks, symbols=_symbols(module), ranks=ranks
    )


def _packed_plan(gm: fx.GraphModule, rewritten: Rewritten, packed: Packed) -> CheckPlan:
    """Plan a graph without padding: outputs and gradients alone, since it has no values of the model."""
    module = torch_packed.copied(packed.original)
    may_write = [packed.writes] * len(_inputs(module))
    padded = Padded(before=packed.before, places=packed.places)
    return dataclasses.replace(_plan(gm, rewritten, module, may_write), padded=padded)


def _plan(
    gm: fx.GraphModule,
    rewritten: Rewritten,
    module: fx.GraphModule,
    may_write: list[bool],
    *,
    communicates: bool = False,
) -> CheckPlan:
    """Make a plan without checks of sites. communicates: True regardless of the nodes."""
    return CheckPlan(
        graph=rewritten.report.graph,
        module=module,
        inputs=[_input_name(str(node.target)) for node in _inputs(module)],
        may_write=may_write,
        devices=torch_compat.graph_devices(gm),
        communicates=communicates or _communicates(module),
        rounded=comparing.coarsest(x.dtype for x in _values(module) if isinstance(x, torch.Tensor)),
        strict=rewritten.strict,
        has_linear=bool(rewritten.report.linear),
    )


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _values(module: fx.GraphModule) -> Iterator[Any]:
    for inside in torch_compat.graph_modules(module):
        yield from map(torch_compat.fake_value, inside.graph.nodes)


def _with_callers(units: Sequence[Unit]) -> list[Unit]:
    """Return the units, and their direct and indirect callers."""
    found: dict[Unit, None] = {}
    waiting = list(units)
    while waiting:
        unit = waiting.pop(0)
        if unit not in found:
            found[unit] = None
            waiting.extend(call.unit for call in unit.place.calls)
    return list(found)


def _look(unit: Unit) -> FirstLook | None:
    """Return the findings of a graph before it was rewritten for ranks."""
    return unit.outcome.first_look if isinstance(unit.outcome, SharedGraph) else None


def _body(index: int, unit: Unit, original: fx.Graph) -> Body:
    if unit.mirror is None:
        raise ValueError("a unit without a mirror has nothing to check")
    look = _look(unit)
    if look is not None and look.final is not None:
        body = Body(index=index, original=_kept(original, look.final), rewritten=look.final, mirror=look.mirror)
        body.outs.update({new: old for old, new in look.outs.items()})
        return body
    rewritten = torch_compat.copied_graph(unit.graph)
    body = Body(index=index, original=_kept(original, rewritten), rewritten=rewritten, mirror=unit.mirror)
    for site in unit.found.sites:
        old = unit.mirror.dynamo_node(site.match.out)
        if site.new_out is not None and old is not None:
            body.outs[site.new_out.name] = old.name
    return body


def _given(unit: Unit, bodies: Mapping[Unit, Body]) -> dict[str, Key]:
    """Return the keys of inputs from the caller: nothing writes to them once the body is called, so the time of reading is free."""
    above = bodies.get(unit.place.calls[0].unit) if unit.written.given else None
    if above is None:
        return {}
    return {
        node.name: Key(above.index, of.name) for node, of in unit.written.given.items() if of.name in above.original
    }


def _kept(original: fx.Graph, rewritten: fx.Graph) -> frozenset[str]:
    """Return the names of the model's own nodes that mean the same after the rewriting.

    Nodes with other inputs than before are still the same: the rewriting inserts equal values. Other numbers among the arguments (another
    softmax axis) are not.
    """
    after = {node.name: node for node in rewritten.nodes}
    return frozenset(n.name for n in original.nodes if n.name not in after or _says(n) == _says(after[n.name]))


def _says(node: fx.Node) -> tuple[object, ...]:
    return node.op, str(node.target), str(fx.map_arg((node.args, dict(node.kwargs)), lambda n: None))


def _checks(unit: Unit, body: Body, ranks: Ranks | None) -> Iterator[Check]:
    """Yield the checks of one unit's sites; for a shared sequence, of the sites as they were before the rewriting."""
    look = _look(unit)
    by_name = {node.name: node for node in body.rewritten.nodes}
    new_outs = {old: by_name.get(new) for new, old in body.outs.items()}
    for site in unit.found.sites if look is None else look.sites:
        if pairs.terms(site):
            yield Check(subject="mask", site=site, body=body)
        if pairs.biases(site):
            yield Check(subject="bias", site=site, body=body)
        old = body.mirror.dynamo_node(site.match.out)
        new = new_outs.get(old.name) if old is not None else None
        check = Check(subject="output", site=site, body=body, new_out=new)
        if (
            look is not None
            and ranks is not None
            and look.is_shared(site)
            and new is not None
            and site.spec is not None
        ):
            whole = WholeLoads(body=body, nodes={node.name: node for node in look.original.nodes}, axes=look.axes)
            check.shared = SharedSite(site=site, spec=site.spec, body=body, new_out=new, whole=whole, ranks=ranks)
        yield check


def _input_name(target: str) -> str:
    """Return Dynamo's name of an input, with the module path of a parameter: L_self_modules_a_parameters_weight_ is a.weight."""
    owner, *path = re.split(r"_(?:modules|parameters|buffers)_", target.removesuffix("_"))
    return ".".join(part.strip("_") for part in path) if path else owner.removeprefix("L_").strip("_")


def _communicates(module: fx.GraphModule) -> bool:
    """Return True if something in the graph waits for other processes. Ops on DTensors may, without a mark."""
    nodes = [node for inside in torch_compat.graph_modules(module) for node in inside.graph.nodes]
    if any("c10d" in str(node.target) for node in nodes if node.op == "call_function"):
        return True
    kinds = {type(x) for value in _values(module) for x in pytree.tree_leaves(value)}
    return any(kind.__module__.startswith("torch.distributed") for kind in kinds)


def _symbols(module: fx.GraphModule) -> dict[tuple[fx.Graph, str], list[tuple[str, int | None]]]:
    """Return the first value with each symbolic size, in every graph."""
    found: dict[tuple[fx.Graph, str], list[tuple[str, int | None]]] = {}
    for inside in torch_compat.graph_modules(module):
        seen: set[str] = set()
        for node in inside.graph.nodes:
            value = node.meta.get("example_value")
            sizes: dict[int | None, Any] = {None: value}
            if isinstance(value, torch.Tensor):
                sizes = dict(enumerate(value.shape))
            for dim, size in sizes.items():
                symbol = str(axes.size_expr(size)) if isinstance(size, torch.SymInt) else ""
                if symbol.isidentifier() and symbol not in seen:
                    seen.add(symbol)
                    found.setdefault((inside.graph, node.name), []).append((symbol, dim))
    return found


def _may_write(module: fx.GraphModule, bodies: dict[fx.Graph, Body]) -> list[bool]:
    """Return True for inputs that may be written: all, for a graph without a mirror, or with a body that writes to its inputs."""
    nested = [inside.graph for inside in torch_compat.graph_modules(module) if inside is not module]
    known = module.graph in bodies and all(graph in bodies and not _written(bodies[graph]) for graph in nested)
    written = _written(bodies[module.graph]) if known else set()
    return [not known or node.name in written for node in _inputs(module)]


def _written(body: Body) -> set[str]:
    """Return the names of the inputs that something in the mirror writes to."""
    written = set().union(*(memory for _, memory in body.mirror.writers))
    inputs: Sequence[fx.Node] = [node for node in body.mirror.graph.nodes if node.op == "placeholder"]
    return {body.names.get(node, node.name) for node in inputs if mutation.storages(node) & written}
