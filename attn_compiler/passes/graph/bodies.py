"""Higher-order calls of a Dynamo graph: the bodies they run, a body's inputs at the call, and the inputs that it writes to.

Read from Dynamo's nodes and example values alone: a body that needs no mirror costs no tracing.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.torch_private import tracing as torch_tracing

#: calls whose last arguments are the inputs of their one body, in order
_PASSES_ON = frozenset(
    {"tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "invoke_subgraph", "wrap_with_set_grad_enabled"}
)

#: functions, or methods in underscores, that `x += y` and other augmented assignments call
_AUGMENTED = frozenset(
    f"i{op}" for op in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
)

#: methods that end in an underscore and write no element
_WRITES_NO_ELEMENT = frozenset({"requires_grad_", "detach_", "retain_grad_"})

#: functions that update statistics: their second and third argument
_UPDATES_STATISTICS = frozenset({"batch_norm", "instance_norm"})


def is_higher_order(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def bodies(call: fx.Node) -> list[fx.GraphModule]:
    """Return the graph modules that a higher-order call is given."""
    given = [n for n in call.all_input_nodes if n.op == "get_attr"]
    modules = [operator.attrgetter(str(n.target))(n.graph.owning_module) for n in given]
    return [module for module in modules if isinstance(module, fx.GraphModule)]


def placeholders(body: fx.GraphModule) -> list[fx.Node]:
    return [n for n in body.graph.nodes if n.op == "placeholder"]


def first_argument(call: fx.Node, body: fx.GraphModule) -> int | None:
    """Return the position of the body's first input among the call's arguments; the others follow. None: the call does not just pass on."""
    first = len(call.args) - len(placeholders(body))
    return first if target_name(call) in _PASSES_ON and first >= 1 else None


def written_by(call: fx.Node) -> set[fx.Node]:
    """Return the inputs of a higher-order call that its bodies may write to; all of them where that is not known."""
    inside = bodies(call)
    if not inside:
        return set(call.all_input_nodes) if call.meta.get("example_value") is None else set()
    found: set[fx.Node] = set()
    for body in inside:
        positions = _written_inputs(body)
        first = first_argument(call, body)
        if positions and first is None:
            return set(call.all_input_nodes)
        given = [call.args[position + (first or 0)] for position in positions]
        found.update(x for x in given if isinstance(x, fx.Node))
    return found


def _written_inputs(body: fx.GraphModule) -> list[int]:
    """Return the positions of the inputs that share memory with a value that the body may write to."""
    written = [node for inside in body.graph.nodes for node in writes(inside)]
    values = [node.meta.get("example_value") for node in written]
    inputs = placeholders(body)
    if not all(has_known_memory(value) for value in values):
        return list(range(len(inputs)))
    memory = mutation.storages_of(values)
    return [
        position
        for position, node in enumerate(inputs)
        if node in written or memory & mutation.storages_of(node.meta.get("example_value"))
    ]


def has_known_memory(value: Any) -> bool:
    """Return whether the memory behind the tensors of a value is known; inside a transform of torch.func it is not."""
    leaves = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    return all(isinstance(part, FakeTensor) for x in leaves for part in torch_tracing.plain_tensors(x))


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that a Dynamo node may write to in place, judged by its name and its flags."""
    if node.op == "call_module":
        return node.all_input_nodes
    if node.op not in ("call_function", "call_method"):
        return []
    if is_higher_order(node):
        return list(written_by(node))
    if isinstance(node.target, torch._ops.OpOverload):
        return mutation.writes(node)
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        overloads = [getattr(node.target, name) for name in node.target.overloads()]  # type: ignore[no-untyped-call]
        if len(overloads) == 1:
            return mutation.declared(node, overloads[0])
        return node.all_input_nodes if any(overload._schema.is_mutable for overload in overloads) else []
    name = target_name(node)
    written = [node.kwargs.get("out")]
    if _writes_its_first(name) or _is_told_to(node):
        written.append(node.args[0] if node.args else node.all_input_nodes)
    if name in _UPDATES_STATISTICS:
        written.append(node.args[1:3])
        written.extend(node.kwargs.get(given) for given in ("running_mean", "running_var"))
    return [x for x in pytree.tree_leaves(written) if isinstance(x, fx.Node)]


def _writes_its_first(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__") and name not in _WRITES_NO_ELEMENT
    return in_place or name.strip("_") in _AUGMENTED or name.strip("_") == "setitem"


def _is_told_to(node: fx.Node) -> bool:
    """Recognise F.relu(x, inplace=True), by keyword or by position."""
    if node.kwargs.get("inplace") is True:
        return True
    if not any(x is True for x in node.args) or not inspect.isfunction(node.target):
        return False
    names = list(inspect.signature(node.target).parameters)
    return "inplace" in names[: len(node.args)] and node.args[names.index("inplace")] is True
