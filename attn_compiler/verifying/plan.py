"""What is to be checked on the first call, made ready before the graph is given away: copies, and what each check needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attn_compiler.passes import Rewritten
from attn_compiler.passes.graph import axes, mutation
from attn_compiler.passes.graph.first_look import FirstLook, SharedGraph
from attn_compiler.passes.graph.padding_outcome import Packed
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.torch_private import compat as torch_compat, packed as torch_packed
from attn_compiler.verifying import comparing, masks, outputs, pairs, scores, shared, site_gradients
from attn_compiler.verifying.copies import copied_module
from attn_compiler.verifying.padding import Padded
from attn_compiler.verifying.ranks import Ranks
from attn_compiler.verifying.shared import SharedSite
from attn_compiler.verifying.values import Body, Key, NoValueError, Values
from attn_compiler.verifying.whole_loads import WholeLoads


@dataclass(kw_only=True, eq=False)
class Check:
    """One thing to compare for one site. needs: what has to be recorded first; skipped: why it can't be compared, if so. shared: the site,
    if its keys are on several ranks."""

    subject: str
    site: Site
    body: Body
    new_out: fx.Node | None = None
    needs: set[Key] = field(default_factory=set)
    skipped: str | None = None
    shared: SharedSite | None = None

    @property
    def is_as_it_was(self) -> bool:
        """Whether the site was left as the model made it."""
        if self.shared is not None:
            return False
        decision = self.site.decision
        return self.site.spec is None or decision is None or self.new_out is None


@dataclass(kw_only=True, eq=False)
class CheckPlan:
    """graph: its name in the report. module: the model's own graph. bodies: by graph module of `module`. checks: in order.

    symbols: name of a symbolic size -> (body, node, dimension) of a value that has it; the dimension is None for a number.
    inputs: names for people. may_write: for each input of the graph, whether something in the graph may write to it. devices: that values
    live on. communicates: with other processes. rounded: the coarsest dtype in it. strict: whether a check that fails itself raises.
    padded: what counts for nothing, in a graph that padding was taken out of. ranks: those that share the sequence, if several do.
    """

    graph: str
    module: fx.GraphModule
    bodies: dict[fx.Graph, Body]
    mirrors: dict[fx.Graph, Body]
    checks: list[Check]
    symbols: dict[tuple[fx.Graph, str], list[tuple[str, int | None]]]
    inputs: list[str]
    may_write: list[bool]
    devices: tuple[torch.device, ...]
    communicates: bool
    rounded: torch.dtype | None
    strict: bool
    padded: Padded | None = None
    ranks: Ranks | None = None

    def gradient_checks(self) -> list[Check]:
        """One for each site."""
        outs = [check for check in self.checks if check.subject == "output"]
        made = [Check(subject="gradient", site=c.site, body=c.body, new_out=c.new_out) for c in outs]
        for check in made:
            _find_needs(check, Values(bodies=self.mirrors))
        return made


def prepare(gm: fx.GraphModule, rewritten: Rewritten) -> CheckPlan | None:
    """The plan for one graph that was rewritten and is about to be given away; None if it holds no site."""
    if rewritten.failed or not any(unit.found.sites for unit in rewritten.units):
        return None
    if rewritten.packed is not None:
        return _of_packed(gm, rewritten, rewritten.packed)
    graphs = {u.graph_module: graph for u, graph in zip(rewritten.units, rewritten.originals, strict=True)}
    graphs |= {u.graph_module: look.original for u in rewritten.units if (look := _look(u)) is not None}
    # A graph without attention is as it was; masks of the bodies that it calls may have been read in it.
    units = _with_callers(rewritten.units)
    for unit in units:
        if unit.graph_module not in graphs:
            graphs[unit.graph_module] = torch_compat.copied_graph(unit.graph)
    module = copied_module(gm, graphs)
    found = [(unit, graphs[unit.graph_module]) for unit in units if unit.mirror is not None]
    made = [_body(index, unit, graph) for index, (unit, graph) in enumerate(found)]
    of_units = {unit: body for (unit, _), body in zip(found, made, strict=True)}
    for unit, body in of_units.items():
        body.given |= _given(unit, of_units)
    bodies = {graph: body for (_, graph), body in zip(found, made, strict=True)}
    mirrors = {body.mirror.graph: body for body in made}
    ranks = next((Ranks.of(look) for unit in units if (look := _look(unit)) is not None), None)
    checks: list[Check] = []
    for (unit, _), body in zip(found, made, strict=True):
        look = _look(unit)
        checks += _checks(unit, body) if look is None or ranks is None else _checks_of_ranks(look, body, ranks)
    plan = CheckPlan(
        graph=rewritten.report.graph,
        module=module,
        bodies=bodies,
        mirrors=mirrors,
        checks=checks,
        symbols=_symbols(module),
        inputs=[_input_name(str(node.target)) for node in module.graph.nodes if node.op == "placeholder"],
        may_write=_may_write(module, bodies),
        devices=torch_compat.graph_devices(gm),
        communicates=ranks is not None or _communicates(module),
        rounded=comparing.coarsest(_dtypes(module)),
        strict=rewritten.units[0].options.strict,
        ranks=ranks,
    )
    for check in checks:
        _find_needs(check, Values(bodies=mirrors))
    return plan


def _of_packed(gm: fx.GraphModule, rewritten: Rewritten, packed: Packed) -> CheckPlan:
    """For a graph without padding: nothing but what it gives, and gradients, since no value of the model's is in it."""
    module = torch_packed.copied(packed.original)
    inputs = list(module.graph.find_nodes(op="placeholder"))
    return CheckPlan(
        graph=rewritten.report.graph,
        module=module,
        bodies={},
        mirrors={},
        checks=[],
        symbols={},
        inputs=[_input_name(str(node.target)) for node in inputs],
        may_write=[packed.writes] * len(inputs),
        devices=torch_compat.graph_devices(gm),
        communicates=_communicates(module),
        rounded=comparing.coarsest(_dtypes(module)),
        strict=rewritten.units[0].options.strict,
        padded=Padded(before=packed.before, places=packed.places),
    )


def _with_callers(units: Sequence[Unit]) -> list[Unit]:
    """The units, and those whose graphs call them, and so on."""
    found: dict[Unit, None] = {}
    waiting = list(units)
    while waiting:
        unit = waiting.pop(0)
        if unit not in found:
            found[unit] = None
            waiting.extend(call.unit for call in unit.place.calls)
    return list(found)


def _look(unit: Unit) -> FirstLook | None:
    """Of a graph that was rewritten for ranks, what was found before."""
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
    """Nothing writes to what is passed on once its body is called: it holds the same whenever it is read."""
    above = bodies.get(unit.place.calls[0].unit) if unit.written.given else None
    if above is None:
        return {}
    return {
        node.name: Key(above.index, of.name) for node, of in unit.written.given.items() if of.name in above.original
    }


def _kept(original: fx.Graph, rewritten: fx.Graph) -> frozenset[str]:
    """The names of the model's own nodes, but for those that mean something else after the rewriting.

    Nodes that read others than before are still the same: the rewriting puts equal values in their places. Other numbers among
    the arguments (another softmax axis) are not.
    """
    after = {node.name: node for node in rewritten.nodes}
    return frozenset(n.name for n in original.nodes if n.name not in after or _says(n) == _says(after[n.name]))


def _says(node: fx.Node) -> tuple[object, ...]:
    return node.op, str(node.target), str(fx.map_arg((node.args, dict(node.kwargs)), lambda n: None))


def _checks(unit: Unit, body: Body) -> list[Check]:
    by_name = {node.name: node for node in body.rewritten.nodes}
    found = []
    for site in unit.found.sites:
        found += _of_scores(site, body)
        new_out = by_name.get(site.new_out.name) if site.new_out is not None else None
        found.append(Check(subject="output", site=site, body=body, new_out=new_out))
    return found


def _of_scores(site: Site, body: Body) -> list[Check]:
    found = [Check(subject="mask", site=site, body=body)] if pairs.terms(site) else []
    return found + ([Check(subject="bias", site=site, body=body)] if pairs.biases(site) else [])


def _checks_of_ranks(look: FirstLook, body: Body, ranks: Ranks) -> list[Check]:
    """For a graph whose attentions were rewritten for a sequence that ranks share: masks and biases as they were read before."""
    by_name = {node.name: node for node in body.rewritten.nodes}
    whole = WholeLoads(body=body, nodes={node.name: node for node in look.original.nodes}, axes=look.axes)
    found = []
    for site in look.sites:
        found += _of_scores(site, body)
        new = by_name.get(look.new_out(site) or "")
        check = Check(subject="output", site=site, body=body, new_out=new)
        if look.is_shared(site) and new is not None and site.spec is not None:
            check.shared = SharedSite(site=site, spec=site.spec, body=body, new_out=new, whole=whole, ranks=ranks)
        found.append(check)
    return found


def _find_needs(check: Check, values: Values) -> None:
    try:
        if check.subject == "mask":
            check.needs = masks.needs(check.site, values)
        elif check.subject == "bias":
            check.needs = scores.needs(check.site, values)
        elif check.subject == "gradient":
            check.needs = site_gradients.needs(check.site, check.body, check.new_out, values)
        elif check.shared is not None:
            check.needs = shared.needs(check.shared, values)
        else:
            check.needs = outputs.needs(check.site, check.body, check.new_out, values)
    except NoValueError as error:
        check.skipped = str(error)


def _input_name(target: str) -> str:
    """What Dynamo calls an input, with the path of the module that a parameter belongs to: L_self_modules_a_parameters_weight_ is
    a.weight."""
    owner, *path = re.split(r"_(?:modules|parameters|buffers)_", target.removesuffix("_"))
    return ".".join(part.strip("_") for part in path) if path else owner.removeprefix("L_").strip("_")


def _communicates(module: fx.GraphModule) -> bool:
    """Whether something in the graph waits for other processes. Ops on DTensors may, and don't say so."""
    nodes = [node for inside in torch_compat.graph_modules(module) for node in inside.graph.nodes]
    if any("c10d" in str(node.target) for node in nodes if node.op == "call_function"):
        return True
    kinds = {type(x) for node in nodes for x in pytree.tree_leaves(torch_compat.fake_value(node))}
    return any(kind.__module__.startswith("torch.distributed") for kind in kinds)


def _dtypes(module: fx.GraphModule) -> set[torch.dtype]:
    values = [torch_compat.fake_value(n) for inside in torch_compat.graph_modules(module) for n in inside.graph.nodes]
    return {x.dtype for x in values if isinstance(x, torch.Tensor)}


def _symbols(module: fx.GraphModule) -> dict[tuple[fx.Graph, str], list[tuple[str, int | None]]]:
    """Where each symbolic size can be seen: the first value that has it, in every graph."""
    found: dict[tuple[fx.Graph, str], list[tuple[str, int | None]]] = {}
    for inside in torch_compat.graph_modules(module):
        seen: set[str] = set()
        for node in inside.graph.nodes:
            for size, dim in _sizes(node.meta.get("example_value")):
                expr = axes.size_expr(size)
                if expr.is_Symbol and str(expr) not in seen:
                    seen.add(str(expr))
                    found.setdefault((inside.graph, node.name), []).append((str(expr), dim))
    return found


def _sizes(value: Any) -> list[tuple[Any, int | None]]:
    if isinstance(value, torch.SymInt):
        return [(value, None)]
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return [(size, dim) for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)]


def _may_write(module: fx.GraphModule, bodies: dict[fx.Graph, Body]) -> list[bool]:
    """A graph without a mirror, or a body that writes to its inputs, may write to any input."""
    inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    nested = [inside.graph for inside in torch_compat.graph_modules(module)]
    if any(graph not in bodies for graph in nested):
        return [True] * len(inputs)
    if any(_written(bodies[graph]) for graph in nested if graph is not module.graph):
        return [True] * len(inputs)
    written = _written(bodies[module.graph])
    return [name in written for name in inputs]


def _written(body: Body) -> set[str]:
    """The names of the inputs that something in the mirror writes to."""
    written = set().union(*(memory for _, memory in body.mirror.writers))
    inputs: Sequence[fx.Node] = [node for node in body.mirror.graph.nodes if node.op == "placeholder"]
    return {body.names.get(node, node.name) for node in inputs if mutation.storages(node) & written}
