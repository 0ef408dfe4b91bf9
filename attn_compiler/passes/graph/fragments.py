"""Traced ATen nodes of Dynamo nodes, kept to be made again: equal layers are traced once.

A fragment is the ATen nodes of one Dynamo node as data. It is made again for a node that calls the same function of PyTorch on the same
numbers and on tensors that agree in all that a trace can see. That is dtype, device, shape, strides, offset, requires_grad, which tensors
are one or share memory, grad mode and autocast. So no layer has to be detected. A node is traced each time if it writes in place, makes a
constant, reads values, has a result that is no tensor, or is unknown to this file.

Symbolic sizes agree if their expressions do. The node that gives a symbolic number to the first call gives it to all others, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph import bodies, mutation, whole_calls
from attn_compiler.passes.graph.fake_records import FakeLike, FakeRecorder, Remaker
from attn_compiler.passes.graph.fragment_keys import NodeInputs, Stands, Unknown, key_of
from attn_compiler.torch_private import symbols as torch_symbols, tracing as torch_tracing


@dataclass(frozen=True, slots=True)
class _Ref:
    """A reference to a node of a template, by number: inputs first, then steps. A node of a symbolic size needs none: it is kept itself."""

    index: int


@dataclass(frozen=True, slots=True)
class _Float:
    """The place of a symbolic float in a template, by its index among the inputs' floats."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """One ATen node. value: of its tensor, or of each one of a sequence."""

    target: Callable[..., Any]
    args: Any
    kwargs: Any
    name: str | None
    value: FakeLike | tuple[FakeLike, ...]
    sequence: type | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """A tensor of the node's result. input: its index among the inputs, or None for the value of a step."""

    input: int | None
    step: int
    requires_grad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fragment:
    """The ATen nodes of a Dynamo node as data.

    moved: inputs that another node stands for afterwards, each with its step: a cast to a tensor's own dtype returns that tensor.
    """

    mode: FakeTensorMode
    steps: tuple[_Step, ...]
    results: tuple[_Result, ...]
    spec: pytree.TreeSpec
    moved: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCall:
    """A Dynamo node with its inputs.

    fragment: of equal nodes, or known without tracing; None where it is not known. is_new: its trace is to be kept. is_untraced: no node
    stands for the sizes of the result yet. asked: the number of guards before it.
    """

    key: Hashable
    inputs: NodeInputs
    fragment: _Fragment | None
    is_new: bool = False
    is_untraced: bool = False
    asked: int = 0


class Fragments:
    """The fragments of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._known: dict[Hashable, _Fragment | None] = {}
        self._written = _written(graph)

    def call(self, node: fx.Node, env: dict[fx.Node, Any], state: Hashable, tracer: Any) -> NodeCall | None:
        """Look up a node. None: such a node is traced each time. state: further state that tracing depends on."""
        if self._written is None:
            return None
        inputs = NodeInputs()
        try:
            told = key_of(node, env, inputs, _standing(tracer))
        except Unknown:
            return None
        key = told, torch.is_grad_enabled(), state
        is_new = key not in self._known
        fragment = _of_whole(node, env, inputs, told, tracer) if is_new else self._known[key]
        if fragment is not None and any(r.requires_grad for r in fragment.results) and self._is_written(node):
            return NodeCall(key=key, inputs=inputs, fragment=None, is_new=is_new)
        if is_new and fragment is not None:
            self._known[key] = fragment
            return NodeCall(key=key, inputs=inputs, fragment=fragment, is_untraced=True)
        return NodeCall(key=key, inputs=inputs, fragment=fragment, is_new=is_new, asked=_asked(inputs))

    def _is_written(self, node: fx.Node) -> bool:
        """Return whether the graph writes to the result: autograd refuses a write to a tensor that no op made, such as one made again."""
        return bool(self._written) and bool(
            mutation.storages_of(node.meta.get("example_value")) & (self._written or set())
        )

    def keep(self, call: NodeCall, result: Any, made: Sequence[fx.Node], tracer: Any) -> None:
        """Remember the trace of a call: its value and its nodes."""
        try:
            # A guard on a float of this call would be missing for another call's float.
            is_kept = call.asked == _asked(call.inputs)
            self._known[call.key] = _recorded(call.inputs, result, made, tracer) if is_kept else None
        except Unknown:
            self._known[call.key] = None


def _asked(inputs: NodeInputs) -> int:
    """Count the guards, where a call has symbolic floats."""
    return len(torch_symbols.guards(torch_symbols.env_of(inputs.floats[0].meta["val"]))) if inputs.floats else 0


def _standing(tracer: Any) -> Stands:
    """Return the function that finds the node of a tensor in a trace: none where the tensor's numbers are known, which a trace may use."""

    def stands(_: fx.Node, value: torch.Tensor | torch.SymFloat) -> fx.Node | None:
        if isinstance(value, torch.Tensor) and torch_tracing.traced_constant(value, tracer) is not None:
            return None
        return torch_tracing.traced_node(value, tracer)

    return stands


def _written(graph: fx.Graph) -> set[Any] | None:
    """Return the memory that the graph writes to in place; None where nothing may be made again."""
    found: set[Any] = set()
    for node in graph.nodes:
        if (getattr(node.target, "__module__", None) or "").startswith("torch.autograd"):
            return None
        for written in bodies.writes(node):
            value = written.meta.get("example_value")
            if not bodies.has_known_memory(value):
                return None
            found |= mutation.storages_of(value)
    return found


# ---- calls without a trace -----------------------------------------------------------------------------------------


def _of_whole(
    node: fx.Node, env: dict[fx.Node, Any], inputs: NodeInputs, key: Hashable, tracer: Any
) -> _Fragment | None:
    """Return the fragment of a call that is one op, taken from Dynamo's value instead of a trace; None if that can't be done."""
    value = node.meta.get("example_value")
    found = whole_calls.read(node, env)
    if found is None or not isinstance(value, FakeTensor) or value.constant is not None:
        return None
    given = {x: x.meta.get("example_value") for x in node.all_input_nodes}
    recorder = FakeRecorder(inputs.holders)
    try:
        if key_of(node, given, NodeInputs(), lambda x, _: x) != key:
            return None
        with torch_tracing.beside_modes(value.fake_mode), torch.no_grad():
            like = recorder.made(value)
    except Unknown:
        return None
    if like.memory < len(inputs.holders):
        return None

    def ref(x: fx.Node) -> Any:
        return _Ref(next(i for i, known in enumerate(inputs.values) if known is env[x]))

    args, kwargs = map_arg((found.args, found.kwargs), ref)
    name = torch_tracing.name_of(found.op, tracer)
    step = _Step(target=found.op, args=args, kwargs=kwargs, name=name, value=like, sequence=None)
    wants = torch.is_grad_enabled() and value.is_floating_point() and any(x.requires_grad for x in inputs.values)
    return _Fragment(
        mode=value.fake_mode,
        steps=(step,),
        results=(_Result(input=None, step=0, requires_grad=wants),),
        spec=pytree.tree_structure(value),
        moved=(),
    )


# ---- traces as data ------------------------------------------------------------------------------------------------


def _recorded(inputs: NodeInputs, result: Any, made: Sequence[fx.Node], tracer: Any) -> _Fragment:
    made = [node for node in made if not _is_number(node)]
    places = {node: i for i, node in reversed(list(enumerate([*inputs.nodes, *made])))}
    leaves, spec = pytree.tree_flatten(result)
    mode = torch_tracing.fake_mode_of_values(leaves)
    if mode is None:
        raise Unknown
    results = tuple(_result(leaf, inputs, places, tracer) for leaf in leaves)
    # Later nodes read symbolic sizes of these very objects, for which the trace has nodes.
    asked = {made[x.step]: leaf for leaf, x in zip(leaves, results, strict=True) if x.input is None}
    recorder = FakeRecorder(inputs.holders)
    with torch_tracing.beside_modes(mode), torch.no_grad():
        steps = tuple(_step(node, asked, places, inputs.floats, recorder, tracer) for node in made)
    moved = []
    for i, (value, before) in enumerate(zip(inputs.values, inputs.nodes, strict=True)):
        after = torch_tracing.traced_node(value, tracer)
        if after is not before:
            moved.append((i, _place(after, places) - len(inputs.nodes)))
    return _Fragment(mode=mode, steps=steps, results=results, spec=spec, moved=tuple(moved))


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _step(
    node: fx.Node,
    asked: dict[fx.Node, torch.Tensor],
    places: dict[fx.Node, int],
    floats: list[fx.Node],
    recorder: FakeRecorder,
    tracer: Any,
) -> _Step:
    target: Any = node.target
    is_op = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    if node.op != "call_function" or not (is_op or target is operator.getitem) or (is_op and target._schema.is_mutable):
        raise Unknown
    value = asked.get(node, node.meta.get("val"))
    is_sequence = isinstance(value, (tuple, list))
    found = tuple(map(recorder.made, value if isinstance(value, (tuple, list)) else (value,)))
    return _Step(
        target=target,
        args=_template(node.args, places, floats),
        kwargs=_template(node.kwargs, places, floats),
        name=torch_tracing.name_of(target, tracer),
        value=found if is_sequence else found[0],
        sequence=type(value) if is_sequence else None,
    )


def _template(arguments: Any, places: dict[fx.Node, int], floats: list[fx.Node]) -> Any:
    def ref(node: fx.Node) -> Any:
        if node in floats:
            return _Float(floats.index(node))
        if floats and isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymBool)):
            raise Unknown  # computed from them
        return node if _is_number(node) else _Ref(_place(node, places))

    return map_arg(arguments, ref)


def _place(node: fx.Node | None, places: dict[fx.Node, int]) -> int:
    if node is None or node not in places:
        raise Unknown
    return places[node]


def _result(leaf: Any, inputs: NodeInputs, places: dict[fx.Node, int], tracer: Any) -> _Result:
    if not isinstance(leaf, FakeTensor) or leaf.constant is not None:
        raise Unknown
    if torch_tracing.traced_constant(leaf, tracer) is not None:
        raise Unknown
    given = next((i for i, value in enumerate(inputs.values) if value is leaf), None)
    step = -1
    if given is None:
        step = _place(torch_tracing.traced_node(leaf, tracer), places) - len(inputs.nodes)
        if step < 0:
            raise Unknown
    return _Result(input=given, step=step, requires_grad=leaf.requires_grad)


# ---- making it again ----------------------------------------------------------------------------------------------


def made_again(call: NodeCall, tracer: Any) -> tuple[Any, list[fx.Node]]:
    """Return the result and the nodes of a call that has a fragment."""
    fragment, inputs = call.fragment, call.inputs
    if fragment is None:
        raise ValueError("there is nothing to make again")
    nodes = list(inputs.nodes)
    results: list[Any] = []
    with torch_tracing.beside_modes(fragment.mode), torch.no_grad():
        maker = Remaker(fragment.mode, inputs.holders)
        for step in fragment.steps:
            node = torch_tracing.add_node(
                tracer, step.target, _filled(step.args, nodes, inputs), _filled(step.kwargs, nodes, inputs), step.name
            )
            node.meta["val"] = _value(step, maker)
            nodes.append(node)
        made = nodes[len(inputs.nodes) :]
        for result in fragment.results:
            if result.input is not None:
                results.append(inputs.values[result.input])
                continue
            like: FakeTensor = made[result.step].meta["val"]
            # This is a new tensor, so that a later change of its shape in place changes no value of the mirror.
            value = torch_tracing.fake(fragment.mode, like, like.fake_device).requires_grad_(result.requires_grad)
            torch_tracing.stand_for(value, made[result.step], tracer)
            if call.is_untraced:
                torch_tracing.track_sizes(value, made[result.step], tracer)
            results.append(value)
        for i, place in fragment.moved:
            torch_tracing.stand_for(inputs.values[i], made[place], tracer)
    return pytree.tree_unflatten(results, fragment.spec), made


def _filled(template: Any, nodes: list[fx.Node], inputs: NodeInputs) -> Any:
    def node(x: Any) -> Any:
        if type(x) is _Float:
            return inputs.floats[x.index]
        return nodes[x.index] if type(x) is _Ref else x

    return map_aggregate(template, node)


def _value(step: _Step, maker: Remaker) -> Any:
    if not isinstance(step.value, tuple):
        return maker.fake(step.value)
    values = map(maker.fake, step.value)
    return tuple(values) if step.sequence is tuple else list(values)
