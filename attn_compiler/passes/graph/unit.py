"""One GraphModule of Dynamo (the graph itself, or a body nested in it) with all that is known of it: the pipeline's object of work."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.options.options import Options
from attn_compiler.passes.graph import bodies, closed, faults, library_ops
from attn_compiler.passes.graph.aliasing import Aliases
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.faults import Log
from attn_compiler.passes.graph.onward import Onward, Outcome
from attn_compiler.passes.graph.spelling import Spelling
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing

if TYPE_CHECKING:
    from attn_compiler.passes.graph.gradient_runs import AlikeRun
    from attn_compiler.passes.graph.mirror import Mirror
    from attn_compiler.passes.graph.site import Miss, Site


@dataclass(frozen=True, kw_only=True, eq=False)
class BodyCall:
    """A higher-order call in the graph of `unit` that passes its arguments on to a body: the first one is its argument `first`."""

    unit: Unit
    node: fx.Node
    first: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffer:
    """A tensor that compiled code keeps from call to call.

    name: the attribute of the root graph module that holds it.
    label: for people, "model.layers.0.self_attn/amax".
    value: a fake tensor like it.
    site: the site that it is kept for.
    origin: its source in Dynamo's words.
    inputs: in the graph of a body, the placeholders for it and for its value before the call. The root's own graph needs none.
    """

    name: str
    label: str
    value: torch.Tensor
    site: Site
    origin: Mapping[str, Any]
    inputs: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitPlace:
    """The place of a graph among the others of a compilation; made by the step units.

    name: "" for the outermost graph, else the path of the body.
    mode: of the graph's fake tensors.
    calls: every call of this body, if all are understood.
    callees: the bodies that this graph calls.
    in_autocast: this body, or one around it, runs with autocast that no node of its own enters: an exported program's.
    """

    name: str
    mode: FakeTensorMode
    calls: list[BodyCall] = field(default_factory=list)
    callees: list[tuple[BodyCall, Unit]] = field(default_factory=list)
    in_autocast: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphMemory:
    """The memory of a graph. aliases: who else reaches it, as Dynamo made it. runs: what autograd saves of calls that are alike."""

    aliases: Aliases
    runs: dict[Hashable, AlikeRun] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundSites:
    """The attentions found in a graph: by match, and then by recover, which gives sites their specs.

    untried: calls that no pattern was tried on because of their arguments.
    """

    sites: tuple[Site, ...] = ()
    misses: tuple[Miss, ...] = ()
    untried: Mapping[fx.Node, Reason] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Written:
    """Further tensors of kernels, beside their operands; filled by lower, attempt by attempt.

    buffers: what the sites keep from call to call (buffers.py).
    given: the further inputs of a body -> the value that its call gives for each (body_inputs.py).
    """

    buffers: list[Buffer] = field(default_factory=list)
    given: dict[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Unit:
    """One graph on its way through the steps: the graph that Dynamo made, or a body that it calls.

    A graph without attention that calls a body with one is a unit too. No step works on it, and it has a mirror only if a mask of the
    body was followed there.

    graph_module: the graph that is rewritten.
    options: the user's.
    place: among the graphs of the compilation.
    memory: who reaches the graph's tensors.
    log: notes while it is worked on.
    spelling: the calls that were spelled out.
    mirror: the graph in ATen ops.
    found: its attentions.
    outcome: of an option that rewrites the graph.
    written: what its kernels need beside operands.
    """

    graph_module: fx.GraphModule
    options: Options
    place: UnitPlace
    memory: GraphMemory
    log: Log
    spelling: Spelling = field(default_factory=Spelling)
    mirror: Mirror | None = None
    found: FoundSites = field(default_factory=FoundSites)
    outcome: Outcome | None = None
    written: Written = field(default_factory=Written)

    @classmethod
    def of(cls, graph_module: fx.GraphModule, options: Options, place: UnitPlace) -> Unit:
        """Make the unit of an untouched graph."""
        memory = GraphMemory(aliases=Aliases(graph=graph_module.graph))
        return cls(
            graph_module=graph_module, options=options, place=place, memory=memory, log=Log(strict=options.strict)
        )

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def mirrored(self) -> Mirror:
        """Return the mirror, after the step that makes it."""
        if self.mirror is None:
            raise ValueError(f"{self.name or 'the graph'} has no mirror")
        return self.mirror

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def mode(self) -> FakeTensorMode:
        return self.place.mode

    @property
    def is_body(self) -> bool:
        """Return whether another graph runs this one."""
        return bool(self.name)

    @property
    def shares_cache(self) -> bool:
        """Return whether the graph takes keys out of a cache that ranks share."""
        # By name: who shares one has imported the op's module.
        name = "attn_compiler.keys_of_slots.default"
        return any(isinstance(n.target, torch._ops.OpOverload) and str(n.target) == name for n in self.graph.nodes)

    @property
    def is_spread(self) -> bool:
        """Return whether ranks share the sequence, or the cache."""
        return self.options.is_context_parallel or self.shares_cache

    @property
    def is_rewritten(self) -> bool:
        """Return whether the graph was changed."""
        return self.spelling.is_any or any(site.new_out is not None for site in self.found.sites)


def units(gm: fx.GraphModule, options: Options) -> list[Unit]:
    """Return the graph module and every body nested in it that holds something like attention, callers before the bodies they call."""
    every: dict[fx.GraphModule, Unit] = {}
    in_autocast = _run_in_autocast(gm)
    for name, module in _bodies(gm, ""):
        mode = torch_tracing.fake_mode_of_values(examples(module))
        if mode is not None and module not in every:
            place = UnitPlace(name=name, mode=mode, in_autocast=module in in_autocast)
            every[module] = Unit.of(module, options, place)
    _connect(gm, every)
    found = _callers_first(list(every.values()))
    # Under context parallelism a graph without attention is looked at, too: it may mix positions.
    is_looked_at = options.is_context_parallel
    return [unit for unit in found if any(map(is_anchor_like, unit.graph.nodes)) or (is_looked_at and not unit.is_body)]


def _bodies(graph_module: fx.GraphModule, name: str) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield bodies depth first. Backward bodies of autograd.Function have no placeholder values and are left out."""
    yield name, graph_module
    # In the order of the graph: a body's result is made before another body is given it.
    targets = dict.fromkeys(str(n.target) for n in graph_module.graph.nodes if n.op == "get_attr")
    for target in targets:
        body = getattr(graph_module, target, None)
        if isinstance(body, fx.GraphModule) and all("example_value" in n.meta for n in bodies.placeholders(body)):
            yield from _bodies(body, f"{name}.{target}" if name else target)


def _connect(root: fx.GraphModule, every: dict[fx.GraphModule, Unit]) -> None:
    """Record the calls of each body on its unit; none for a body that is called in a way that is not understood."""
    closed: set[fx.GraphModule] = set()
    for module in torch_compat.graph_modules(root):
        for call in [n for n in module.graph.nodes if n.op == "call_function"]:
            for body in bodies.bodies(call):
                first = bodies.first_argument(call, body)
                if body not in every or module not in every or first is None:
                    closed.add(body)
                else:
                    every[body].place.calls.append(BodyCall(unit=every[module], node=call, first=first))
    for body in closed & every.keys():
        every[body].place.calls.clear()
    for unit in every.values():
        for call in unit.place.calls:
            call.unit.place.callees.append((call, unit))


def _run_in_autocast(root: fx.GraphModule) -> set[fx.GraphModule]:
    """Return the bodies that a call runs with autocast, and those inside of them."""
    calls = [
        node for module in torch_compat.graph_modules(root) for node in module.graph.nodes if node.op == "call_function"
    ]
    run = [body for call in calls if target_name(call) == "wrap_with_autocast" for body in bodies.bodies(call)]
    return {module for body in run for module in torch_compat.graph_modules(body)}


def _callers_first(found: list[Unit]) -> list[Unit]:
    ordered: list[Unit] = []
    rest = found
    while rest:
        free = next((u for u in rest if all(call.unit in ordered for call in u.place.calls)), rest[0])
        ordered.append(free)
        rest = [unit for unit in rest if unit is not free]
    return ordered


def examples(graph_module: fx.GraphModule) -> list[object]:
    return [n.meta.get("example_value") for n in graph_module.graph.nodes if n.op == "placeholder"]


_FUSED_CALLS = ("multi_head_attention", "transformer_encoder_layer_fwd", "flex_attention")


#: the nodes between an exponential and a logarithm: a difference and a view
_STEPS_TO_LOGARITHM = 2


def is_anchor_like(node: fx.Node) -> bool:
    """Return whether a Dynamo node can hold an anchor: a cheap look at its name, so that other graphs never get a mirror."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = target_name(node)
    softmax = ("softmax" in name or "softmin" in name) and "log_softmax" not in name and "gumbel" not in name
    fused = any(call in name for call in _FUSED_CALLS)
    return (
        softmax
        or fused
        or _is_in_softmax(node)
        or "scaled_dot_product" in name
        or library_ops.kernel_in(node) is not None
    )


def _is_in_softmax(node: fx.Node) -> bool:
    """Return whether an exponential may belong to a softmax that is written out: it is summed, or is of a logarithm of weights."""
    if target_name(node) != "exp":
        return False
    above = dict.fromkeys(node.all_input_nodes)
    for _ in range(_STEPS_TO_LOGARITHM):
        above |= dict.fromkeys(x for source in above for x in source.all_input_nodes)
    is_summed = any(target_name(user) == "sum" for user in node.users)
    return is_summed or any(target_name(x) in ("log_softmax", "logsumexp") for x in above)


def told_owners(units: Iterable[Unit]) -> frozenset[fx.Node]:
    """Return Dynamo's nodes between the two products of any site, and those at which a match stopped."""
    return frozenset(
        owner
        for unit in units
        if (mirror := unit.mirror) is not None
        for node in chain(
            *(site.match.covered for site in unit.found.sites), (miss.anchor for miss in unit.found.misses)
        )
        if (owner := mirror.owner(node)) is not None
    )


def leave_closed(unit: Unit) -> Onward | None:
    """Leave a graph alone if no attention of it can be looked at."""
    unit.log.left_alone = closed_to_us(unit)
    return None if unit.log.left_alone is None else Onward(step=None)


def warned(units: Iterable[Unit]) -> tuple[str, ...]:
    """Warn of the faults in all graphs, and return the warnings."""
    return faults.warned(unit.log for unit in units)


def closed_to_us(unit: Unit) -> Reason | None:
    """Return why no attention of a graph is looked at; None where it is."""
    unsupported = unsupported_tensor(unit.graph_module)
    if unsupported is not None:
        return Reason(
            code=Code.CLOSED_TENSOR, rule="the graph's inputs are plain strided tensors", observed=unsupported
        )
    if unit.place.in_autocast:
        return Reason(
            code=Code.AUTOCAST_BODY,
            rule="an exported program's attention is outside of `with torch.autocast`",
            observed="wrap_with_autocast runs the graph that it is in",
            remedy="export the model in the dtype that autocast would have given (model.bfloat16()), without autocast",
        )
    return None


def unsupported_tensor(graph_module: fx.GraphModule) -> str | None:
    """Return the kind of the first input that is no strided tensor, or None: graphs with one are left alone.

    Tensors that wrap others are closed (closed.py) and do not count.
    """
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and not torch_compat.is_wrapper_subclass(value):
            kind = tensor_kind(value)
            if kind is not None:
                return f"{node.name} is {kind}"
    return None


def tensor_kind(value: torch.Tensor) -> str | None:
    """Return the kind of a tensor that is not plain and strided: a subclass such as DTensor, nested, or sparse; else None."""
    if torch_compat.is_wrapper_subclass(value) or value.is_nested:
        return closed.name_of(value)
    return None if value.layout == torch.strided else f"a {str(value.layout).removeprefix('torch.')} tensor"


_FLEX_FILE = os.path.join("torch", "nn", "attention", "flex_attention.py")


def module_path(node: fx.Node) -> str:
    """Return the module that a Dynamo node comes from, as the model names it: "model.layers.3.self_attn"."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return clean_path(paths[-1]) if paths else "(no module)"


def source_line(node: fx.Node) -> str | None:
    """Return the model's line that makes a Dynamo node: "modeling_llama.py:191". FlexAttention's functions are no model's code."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].endswith(_FLEX_FILE)] or frames
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else None


#: parts of Dynamo's paths to modules that are no model's names: `__dict__` occurs where a class has a __getattr__ of its own
_NOT_NAMES = frozenset({"L", "G", "self", "fn", "_orig_mod", "module", "_modules", "modules", "__dict__", ""})


def clean_path(path: str) -> str:
    """Return Dynamo's spelling of a module path without its sources and brackets."""
    # A model that is compiled in place is the first argument of its own __call__.
    path = path.removeprefix("L['args'][0]")
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    parts = [p for p in path.split(".") if p not in _NOT_NAMES]
    return ".".join(parts) or "(root)"


def paths_of_runs(unit: Unit, module: str) -> tuple[str, ...]:
    """Return the path of a unit's module in each of its runs, in order. module: its path in the first run, which was traced.

    `torch.compiler.nested_compile_region` traces equal layers once, and calls the trace for each.
    """
    if not unit.place.calls:
        return (module,)
    first = module_path(unit.place.calls[0].node)
    return tuple(path for call in unit.place.calls for path in paths_of_runs(call.unit, _at(call, module, first)))


def _at(call: BodyCall, module: str, first: str) -> str:
    """Path of a module in one run. If the region is no method of a module, its runs can't be told apart."""
    inside = module == first or module.startswith(f"{first}.")
    return module_path(call.node) + module.removeprefix(first) if inside else module
