"""The checks of the first call, prepared before the graph is given away: copies, and the needs of each check."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attn_compiler.passes import Rewritten
from attn_compiler.passes.context_parallel.first_look import FirstLook, SharedGraph
from attn_compiler.passes.graph import axes, mutation
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.unpad.outcome import Packed
from attn_compiler.spec.numerics import FLOOR_ULPS
from attn_compiler.torch_private import compat as torch_compat, packed as torch_packed
from attn_compiler.verifying import pairs
from attn_compiler.verifying.interpreting import copied_module
from attn_compiler.verifying.outputs import OutputCheck
from attn_compiler.verifying.pairs import BiasCheck, MaskCheck
from attn_compiler.verifying.ranks import Ranks, SharedCheck, WholeLoads
from attn_compiler.verifying.values import Body, Check, Key, Values


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
        cleared = dict(found)
        for i, x in found.items():
            if i in self.places and isinstance(x, torch.Tensor):
                rows, positions = self.places[i]
                shape = [1] * x.dim()
                shape[rows], shape[positions] = real.shape
                if rows == positions:
                    shape[rows] = real.numel()
                kept = (real.t() if rows > positions else real).reshape(shape)
                cleared[i] = torch.where(kept, x, torch.zeros((), dtype=x.dtype, device=x.device))
        return cleared


@dataclass(frozen=True, kw_only=True, eq=False)
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

    def outputs(self) -> list[OutputCheck]:
        """Return the checks of outputs, one a site."""
        return [check for check in self.checks if isinstance(check, OutputCheck)]


def prepare(gm: fx.GraphModule, rewritten: Rewritten) -> CheckPlan | None:
    """Plan the checks of a rewritten graph that is about to be given away; None if it has no site, and no linear attention."""
    if rewritten.failed or not (rewritten.report.linear or any(unit.found.sites for unit in rewritten.units)):
        return None
    packed = rewritten.outcome(Packed)
    if packed is not None:
        # A graph without padding has no values of the model: outputs and gradients alone are compared.
        module = torch_packed.copied(packed.original)
        padded = Padded(before=packed.before, places=packed.places)
        return _plan(gm, rewritten, module, [packed.writes] * len(_inputs(module)), padded=padded)
    graphs = {u.graph_module: graph for u, graph in zip(rewritten.units, rewritten.originals, strict=True)}
    if rewritten.snapshot is not None and rewritten.report.linear:
        # Graphs without softmax attention may call linear attention.
        graphs = {module: rewritten.snapshot.graph(module) for module in torch_compat.graph_modules(gm)} | graphs
    graphs |= {u.graph_module: look.original for u in rewritten.units if (look := _look(u)) is not None}
    # A graph without attention is unchanged; masks of bodies that it calls may have been read in it.
    units = list(rewritten.units)
    for unit in units:
        units.extend(dict.fromkeys(call.unit for call in unit.place.calls if call.unit not in units))
        if unit.graph_module not in graphs:
            graphs[unit.graph_module] = torch_compat.copied_graph(unit.graph)
    module = copied_module(gm, graphs)
    mirrored = [unit for unit in units if unit.mirror is not None]
    made = {unit: _body(index, unit, graphs[unit.graph_module]) for index, unit in enumerate(mirrored)}
    for unit, body in made.items():
        above = made.get(unit.place.calls[0].unit) if unit.written.given else None
        if above is not None:
            # Nothing writes to inputs from the caller once the body is called, so the time of reading is free.
            given = {node.name: of.name for node, of in unit.written.given.items() if of.name in above.original}
            body.given |= {name: Key(above.index, own) for name, own in given.items()}
    bodies = {graphs[unit.graph_module]: body for unit, body in made.items()}
    mirrors = {body.mirror.graph: body for body in made.values()}
    ranks = next((Ranks.from_look(look) for unit in units if (look := _look(unit)) is not None), None)
    checks = [check for unit, body in made.items() for check in _checks(unit, body, ranks)]
    for check in checks:
        check.find_needs(Values(bodies=mirrors))
    found = {"bodies": bodies, "mirrors": mirrors, "checks": checks, "symbols": _symbols(module), "ranks": ranks}
    return _plan(gm, rewritten, module, _may_write(module, bodies), **found)


def _plan(
    gm: fx.GraphModule, rewritten: Rewritten, module: fx.GraphModule, may_write: list[bool], **found: Any
) -> CheckPlan:
    leaves = [x for node in _nodes(module) for x in pytree.tree_leaves(torch_compat.fake_value(node))]
    # Something in the graph waits for other processes. Ops on DTensors may, without a mark.
    communicates = (
        found.get("ranks") is not None
        or any("c10d" in str(node.target) for node in _nodes(module) if node.op == "call_function")
        or any(kind.__module__.startswith("torch.distributed") for kind in {type(x) for x in leaves})
    )
    dtypes = [x.dtype for x in leaves if isinstance(x, torch.Tensor) and x.dtype in FLOOR_ULPS]
    return CheckPlan(
        graph=rewritten.report.graph,
        module=module,
        inputs=[_input_name(str(node.target)) for node in _inputs(module)],
        may_write=may_write,
        devices=torch_compat.graph_devices(gm),
        communicates=communicates,
        rounded=max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None),
        strict=rewritten.strict,
        has_linear=bool(rewritten.report.linear),
        **found,
    )


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for inside in torch_compat.graph_modules(module):
        yield from inside.graph.nodes


def _look(unit: Unit) -> FirstLook | None:
    """Return the findings of a graph before it was rewritten for ranks."""
    return unit.outcome.first_look if isinstance(unit.outcome, SharedGraph) else None


def _body(index: int, unit: Unit, original: fx.Graph) -> Body:
    if unit.mirror is None:
        raise ValueError("a unit without a mirror has nothing to check")
    look = _look(unit)
    if look is not None and look.final is not None:
        rewritten, mirror = look.final, look.mirror
        outs = {new: old for old, new in look.outs.items()}
    else:
        rewritten, mirror = torch_compat.copied_graph(unit.graph), unit.mirror
        sites = [(site.new_out, mirror.dynamo_node(site.match.out)) for site in unit.found.sites]
        outs = {new.name: old.name for new, old in sites if new is not None and old is not None}
    # Nodes with other inputs than before still mean the same: the rewriting inserts equal values. Other numbers among the arguments
    # (another softmax axis) do not.
    after = {node.name: node for node in rewritten.nodes}
    kept = frozenset(n.name for n in original.nodes if n.name not in after or _says(n) == _says(after[n.name]))
    return Body(index=index, original=kept, rewritten=rewritten, mirror=mirror, outs=outs)


def _says(node: fx.Node) -> tuple[object, ...]:
    return node.op, str(node.target), str(fx.map_arg((node.args, dict(node.kwargs)), lambda n: None))


def _checks(unit: Unit, body: Body, ranks: Ranks | None) -> Iterator[Check]:
    """Yield the checks of one unit's sites; for a shared sequence, of the sites as they were before the rewriting."""
    look = _look(unit)
    by_name = {node.name: node for node in body.rewritten.nodes}
    new_outs = {old: by_name.get(new) for new, old in body.outs.items()}
    for site in unit.found.sites if look is None else look.sites:
        if site.added or site.allowed:
            yield MaskCheck(site=site, body=body)
        if pairs.biases(site):
            yield BiasCheck(site=site, body=body)
        old = body.mirror.dynamo_node(site.match.out)
        new = new_outs.get(old.name) if old is not None else None
        is_shared = look is not None and look.is_shared(site)
        if look is None or ranks is None or not is_shared or new is None or site.spec is None:
            yield OutputCheck(site=site, body=body, new_out=new)
        else:
            whole = WholeLoads(body=body, nodes={node.name: node for node in look.original.nodes}, axes=look.axes)
            yield SharedCheck(site=site, body=body, new_out=new, spec=site.spec, whole=whole, ranks=ranks)


def _input_name(target: str) -> str:
    """Return Dynamo's name of an input, with the module path of a parameter: L_self_modules_a_parameters_weight_ is a.weight."""
    owner, *path = re.split(r"_(?:modules|parameters|buffers)_", target.removesuffix("_"))
    return ".".join(part.strip("_") for part in path) if path else owner.removeprefix("L_").strip("_")


def _symbols(module: fx.GraphModule) -> dict[tuple[fx.Graph, str], list[tuple[str, int | None]]]:
    """Return the first value with each symbolic size, in every graph."""
    found: dict[tuple[fx.Graph, str], list[tuple[str, int | None]]] = {}
    seen: set[tuple[fx.Graph, str]] = set()
    for node in _nodes(module):
        value = node.meta.get("example_value")
        sizes = dict(enumerate(value.shape)) if isinstance(value, torch.Tensor) else {None: value}
        for dim, size in sizes.items():
            symbol = str(axes.size_expr(size)) if isinstance(size, torch.SymInt) else ""
            if symbol.isidentifier() and (node.graph, symbol) not in seen:
                seen.add((node.graph, symbol))
                found.setdefault((node.graph, node.name), []).append((symbol, dim))
    return found


def _may_write(module: fx.GraphModule, bodies: dict[fx.Graph, Body]) -> list[bool]:
    """Return True for inputs that may be written: all, for a graph without a mirror, or with a body that writes to its inputs."""
    written: dict[fx.Graph, set[str]] = {}
    for graph, body in bodies.items():
        memory = body.written
        inputs = [node for node in body.mirror.graph.nodes if node.op == "placeholder"]
        written[graph] = {body.names.get(node, node.name) for node in inputs if mutation.storages(node) & memory}
    insides = torch_compat.graph_modules(module)
    known = all(x.graph in written and (x is module or not written[x.graph]) for x in insides)
    return [not known or node.name in written[module.graph] for node in _inputs(module)]
