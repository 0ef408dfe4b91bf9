"""What the pipeline works on: one GraphModule of Dynamo's (the graph itself, or a body nested in it) and what is known of it."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.context_parallel.lockstep import Meeting
from attn_compiler.options.options import Options
from attn_compiler.passes.graph import axes, bodies, closed, library_ops, mirror, relevance
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Miss, Site
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing
from attn_compiler.torch_private.meanings import Known

if TYPE_CHECKING:
    from attn_compiler.passes.context_parallel.first_look import FirstLook
    from attn_compiler.passes.graph.faults import Fault
    from attn_compiler.passes.graph.saved import AlikeRun, Ways
    from attn_compiler.passes.recovering.reading import Reader
    from attn_compiler.passes.spelling.flex import Spelled
    from attn_compiler.passes.unpad.outcome import Outcome


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
    site: what it is kept for.
    origin: where Dynamo says that it is from.
    inputs: in the graph of a body, the placeholders for it and for what it held before the call. The root's own graph needs none.
    """

    name: str
    label: str
    value: torch.Tensor
    site: Site
    origin: Mapping[str, Any]
    inputs: tuple[fx.Node, ...] = ()


@dataclass(kw_only=True, eq=False)
class Unit:
    """One graph on its way through the passes: the graph that Dynamo made, or a body that it calls.

    A graph without attention that calls a body with one is a unit too. It goes through no pass, and has a mirror only if a mask of the
    body was followed there.

    graph_module: what is rewritten.
    name: "" for the graph itself, else the path of the body.
    options: the user's.
    mode: of the graph's fake tensors.
    mirror: the graph in ATen ops; set by mirror.
    expanded: the calls that were spelled out; set by expand.
    moved: the softmaxes whose axis was moved; set by expand.
    local: calls on local tensors that took the place of calls on DTensors, each with what is to be said of it; set by expand.
    spelled: FlexAttention's and libraries' calls that are spelled out beside them; set by expand, and given back in the end.
    sites, misses: what was found; set by match, and completed by the passes after it.
    untried: calls that no pattern was tried on, for what they are given; set by expand and match.
    current: the module whose site is being worked on, for messages.
    left_alone: why the whole graph is left as it is, if it is.
    targets: the machine, by device type; read when first needed.
    calls: every call of this body, if all are understood.
    callees: the bodies that this graph calls.
    reader: reads elements of the mirror's tensors.
    buffers: what the sites keep (buffers.py).
    given: the further inputs of a body, each with what its call gives for it (body_inputs.py).
    faults: what cost one of the sites (faults.py).
    unread: what failed in reading masks, which stay tensors (recover.py).
    ways: how the graph's memory is reached from outside (saved.py).
    runs: what autograd saves of calls that are alike (saved.py).
    in_autocast: this body, or one around it, is run with autocast that no node of its own enters: an exported program's.
    relied_on: inputs of which something had to be known, and what (reading/borders.py).
    unpadded: what became of the padding, with options.unpad (unpad/).
    is_looked_at_again: its attentions were rewritten for the whole sequence, and are matched once more (context_parallel/).
    first_look: what was found before they were rewritten, with options.verify.
    meetings: where its ranks meet before each call, if it was rewritten for a sequence that they share.
    longer: sizes that stand for larger ones, if ranks share a sequence: what is said of an index along them has to hold up to these.
    lowerings: the only ones that may serve the sites; None: whichever options allow.
    """

    graph_module: fx.GraphModule
    name: str
    options: Options
    mode: FakeTensorMode
    mirror: Mirror | None = None
    expanded: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    local: dict[fx.Node, str] = field(default_factory=dict)
    spelled: list[Spelled] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    untried: dict[fx.Node, Reason] = field(default_factory=dict)
    current: str = ""
    left_alone: Reason | None = None
    targets: dict[str, Target] = field(default_factory=dict)
    calls: list[BodyCall] = field(default_factory=list)
    callees: list[tuple[BodyCall, Unit]] = field(default_factory=list)
    reader: Reader | None = None
    buffers: list[Buffer] = field(default_factory=list)
    given: dict[fx.Node, fx.Node] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    ways: Ways | None = None
    runs: dict[Hashable, AlikeRun] = field(default_factory=dict)
    relied_on: dict[fx.Node, Known] = field(default_factory=dict)
    unpadded: Outcome | None = None
    lowerings: tuple[str, ...] | None = None
    in_autocast: bool = False
    is_looked_at_again: bool = False
    first_look: FirstLook | None = None
    meetings: tuple[Meeting, ...] = ()
    longer: Mapping[int, int] = field(default_factory=dict)

    def target(self, device: str) -> Target:
        """The machine that a site on this device type will run on."""
        if device not in self.targets:
            self.targets[device] = Target.current(device)
        return self.targets[device]

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def is_body(self) -> bool:
        """Whether another graph runs this one."""
        return bool(self.name)

    @property
    def is_rewritten(self) -> bool:
        """Whether the graph is no longer as it came."""
        return bool(self.expanded or self.moved or self.local or self.spelled) or any(
            site.new_out is not None for site in self.sites
        )

    def mirrored(self) -> Mirror:
        """The unit's mirror, made if there is none yet."""
        if self.mirror is None:
            masks = [*self._masks_passed_on(), *(handed_on(self.graph) if not self.is_body else ())]
            blocks = [one.blocks for one in self.spelled if one.blocks is not None]
            masks += [one.dense for one in blocks if one.dense is not None]
            # What is skipped has no meaning, and packing and context parallelism ask each op for its own.
            is_asked_for_all = self.options.unpad and self.unpadded is None and self.lowerings is None
            is_asked_for_all = is_asked_for_all or (self.options.is_context_parallel and not self.is_looked_at_again)
            skipped = frozenset() if is_asked_for_all else relevance.skippable(self.graph, is_anchor_like, masks)
            with torch_tracing.tracing_in(self.mode):
                self.mirror = mirror.build(self.graph_module, skipped)
        return self.mirror

    def _masks_passed_on(self) -> list[fx.Node]:
        """What this graph gives to bodies that may make a mask of it."""
        found = []
        for call, body in self.callees:
            wanted = relevance.mask_inputs(body.graph, is_anchor_like, body._masks_passed_on())
            inputs = bodies.placeholders(body.graph_module)
            found += [call.node.args[call.first + i] for i, node in enumerate(inputs) if node in wanted]
        return [x for x in found if isinstance(x, fx.Node)]


def handed_on(graph: fx.Graph) -> list[fx.Node]:
    """What a graph gives back that may be a mask of another one, or what such a mask is made of."""
    return [node for node in graph.output_node().all_input_nodes if may_be_of_mask(node.meta.get("example_value"))]


def may_be_of_mask(value: object) -> bool:
    """Positions, truth values, or numbers for each query and key that are the same for all heads; without a gradient."""
    if not isinstance(value, torch.Tensor) or value.requires_grad or closed.holds_closed(value):
        return False
    if not value.is_floating_point():
        return value.dim() > 0 and not value.is_complex()
    if value.dim() < 2:
        return False
    is_square = axes.size_expr(value.shape[-1]) == axes.size_expr(value.shape[-2])
    is_one = value.dim() > 2 and axes.size_expr(value.shape[-3]) == axes.ONE
    return is_one if value.dim() > 2 else is_square


def units(graph_module: fx.GraphModule, options: Options, targets: dict[str, Target]) -> list[Unit]:
    """The graph module and every body nested in it that holds something like attention; callers before what they call."""
    targets = dict(targets)
    every: dict[fx.GraphModule, Unit] = {}
    for name, module in _bodies(graph_module, ""):
        mode = torch_tracing.fake_mode_of_values(examples(module))
        if mode is not None and module not in every:
            every[module] = Unit(graph_module=module, name=name, options=options, mode=mode, targets=targets)
    _connect(graph_module, every)
    found = _callers_first(list(every.values()))
    # Under context parallelism a graph without attention is looked at, too: it may mix positions.
    is_looked_at = options.is_context_parallel
    return [unit for unit in found if any(map(is_anchor_like, unit.graph.nodes)) or (is_looked_at and not unit.is_body)]


def _bodies(graph_module: fx.GraphModule, name: str) -> Iterator[tuple[str, fx.GraphModule]]:
    """Depth first. Backward bodies of autograd.Function have no placeholder values and are left out."""
    yield name, graph_module
    # In the order of the graph, in which what a body gives back is made before another is given it.
    targets = dict.fromkeys(str(n.target) for n in graph_module.graph.nodes if n.op == "get_attr")
    for target in targets:
        body = getattr(graph_module, target, None)
        if isinstance(body, fx.GraphModule) and _has_values(body):
            yield from _bodies(body, f"{name}.{target}" if name else target)


def _connect(root: fx.GraphModule, every: dict[fx.GraphModule, Unit]) -> None:
    """Tell each body's unit where it is called. One that is called in a way that is not looked into is told nothing."""
    closed: set[fx.GraphModule] = set()
    for module in torch_compat.graph_modules(root):
        for call in [n for n in module.graph.nodes if n.op == "call_function"]:
            for body in bodies.bodies(call):
                first = bodies.first_argument(call, body)
                if target_name(call) == "wrap_with_autocast":
                    _enter_autocast(every, body)
                if body not in every or module not in every or first is None:
                    closed.add(body)
                else:
                    every[body].calls.append(BodyCall(unit=every[module], node=call, first=first))
    for body in closed & every.keys():
        every[body].calls.clear()
    for unit in every.values():
        for call in unit.calls:
            call.unit.callees.append((call, unit))


def _enter_autocast(every: dict[fx.GraphModule, Unit], body: fx.GraphModule) -> None:
    for module in torch_compat.graph_modules(body):
        if module in every:
            every[module].in_autocast = True


def _callers_first(found: list[Unit]) -> list[Unit]:
    """The same units in an order in which each comes after all that call it."""
    ordered: list[Unit] = []
    rest = found
    while rest:
        free = next((u for u in rest if all(call.unit in ordered for call in u.calls)), rest[0])
        ordered.append(free)
        rest = [unit for unit in rest if unit is not free]
    return ordered


def _has_values(graph_module: fx.GraphModule) -> bool:
    return all("example_value" in n.meta for n in graph_module.graph.nodes if n.op == "placeholder")


def examples(graph_module: fx.GraphModule) -> list[object]:
    return [n.meta.get("example_value") for n in graph_module.graph.nodes if n.op == "placeholder"]


_FUSED_CALLS = ("multi_head_attention", "transformer_encoder_layer_fwd", "flex_attention")


def is_anchor_like(node: fx.Node) -> bool:
    """Whether a Dynamo node can hold an anchor. A cheap look at its name, so that other graphs never get a mirror."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = target_name(node)
    softmax = ("softmax" in name or "softmin" in name) and "log_softmax" not in name and "gumbel" not in name
    fused = any(call in name for call in _FUSED_CALLS)
    return softmax or fused or "scaled_dot_product" in name or library_ops.kernel_in(node) is not None


def unsupported_tensor(graph_module: fx.GraphModule) -> str | None:
    """The kind of the first input that is no strided tensor, if there is one: such graphs are left alone. Tensors that wrap others are
    closed (closed.py)."""
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and not torch_compat.is_wrapper_subclass(value):
            kind = tensor_kind(value)
            if kind is not None:
                return f"{node.name} is {kind}"
    return None


def tensor_kind(value: torch.Tensor) -> str | None:
    """What a tensor is besides a plain strided one: a subclass such as DTensor, nested, or sparse; None if it is nothing else."""
    if torch_compat.is_wrapper_subclass(value) or value.is_nested:
        return closed.name_of(value)
    return None if value.layout == torch.strided else f"a {str(value.layout).removeprefix('torch.')} tensor"


_FLEX_FILE = os.path.join("torch", "nn", "attention", "flex_attention.py")


def module_path(node: fx.Node) -> str:
    """The module that a Dynamo node comes from, as the model names it: "model.layers.3.self_attn"."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return clean_path(paths[-1]) if paths else "(no module)"


def source_line(node: fx.Node) -> str | None:
    """Where the model's code makes a Dynamo node: "modeling_llama.py:191". FlexAttention's functions are no model's code."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].endswith(_FLEX_FILE)] or frames
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else None


#: steps of a path by which Dynamo reaches a module, and which no model gives to one: `__dict__` where a class has a __getattr__ of its own
_NOT_NAMES = frozenset({"L", "G", "self", "fn", "_orig_mod", "module", "_modules", "modules", "__dict__", ""})


def clean_path(path: str) -> str:
    """Dynamo's spelling of a module path without its sources and brackets."""
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    parts = [p for p in path.split(".") if p not in _NOT_NAMES]
    return ".".join(parts) or "(root)"
