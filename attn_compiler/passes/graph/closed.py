"""Values that a mirror does not look into: tensors that wrap others (DTensor, quantised weights, nested tensors), and script objects.

A node is closed if its value, or one of its inputs, is such a value. In a mirror it is an `opaque` call. A token stands there for a tensor
that wraps others. The token's `meta["val"]` is the tuple of the plain tensors inside, which tell its memory. So the local tensor of a
DTensor is known to be in the DTensor's memory, and a write to one is a write to the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from attn_compiler.passes.graph import bodies, mutation
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing

#: methods that only tensors that wrap others have: each returns its result and writes nothing
_ONLY_READ = frozenset("to_local full_tensor redistribute dequantize wait offsets lengths values".split())

#: modules whose functions tell by their names what they write (`add_`, `out=`, `inplace=`)
_NAMED_AS_PYTORCH_DOES = ("torch", "_operator", "builtins", "attn_compiler")


class Pair(NamedTuple):
    """A plain tensor in Dynamo's graph, and its counterpart in a mirror."""

    dynamo: torch.Tensor
    mine: torch.Tensor


def is_closed(node: fx.Node) -> bool:
    """Return whether a mirror can't look into a Dynamo node, because of its value or of one of its inputs."""
    return holds_closed(node.meta.get("example_value")) or reads_closed(node)


def reads_closed(node: fx.Node) -> bool:
    """Return whether one of the node's inputs is a closed value."""
    return any(holds_closed(i.meta.get("example_value")) for i in node.all_input_nodes)


def holds_closed(value: Any) -> bool:
    """Return whether a value, or something in a nest of values, is closed."""
    if value is None or type(value) is FakeTensor:
        return False
    return any(
        torch_compat.is_wrapper_subclass(x) or torch_tracing.is_script_object(x) for x in pytree.tree_leaves(value)
    )


def written(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a closed node that it may write to: all of them if its function is not known."""
    if node.op == "call_method":
        is_known = hasattr(torch.Tensor, str(node.target)) or node.target in _ONLY_READ
    elif isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        is_known = True
    else:
        module = str(getattr(node.target, "__module__", "") or "")
        is_known = node.op == "call_function" and module.split(".")[0] in _NAMED_AS_PYTORCH_DOES
    return bodies.writes(node) if is_known else node.all_input_nodes


def kind(node: fx.Node) -> str | None:
    """Say in words what closes a node: "query is a DTensor"."""
    for i in node.all_input_nodes:
        for x in pytree.tree_leaves(i.meta.get("example_value")):
            if isinstance(x, torch.Tensor) and torch_compat.is_wrapper_subclass(x):
                return f"{parameter(node, i)} is {name_of(x)}"
    return None


def is_of_nested(node: fx.Node) -> bool:
    """Return whether a node, or one of its inputs, is a nested tensor."""
    values = [x.meta.get("example_value") for x in (node, *node.all_input_nodes)]
    leaves = [x for value in values if holds_closed(value) for x in pytree.tree_leaves(value)]
    return any(isinstance(x, torch.Tensor) and x.is_nested for x in leaves)


def name_of(value: torch.Tensor) -> str:
    """Return the kind of a tensor that wraps others, with its article."""
    return "a nested tensor" if value.is_nested else f"a {type(value).__name__}"


def parameter(node: fx.Node, given: fx.Node) -> str:
    """Return the parameter's name of an input of a call, or the input's own name."""
    names = ("query", "key", "value", "attn_mask") if "scaled_dot_product" in target_name(node) else ()
    by_place = dict(zip(node.args, names, strict=False))
    by_name = {x: name for name, x in node.kwargs.items() if isinstance(x, fx.Node)}
    return by_name.get(given) or by_place.get(given) or str(given.name)


def stand_ins(values: Sequence[Any]) -> list[Any]:
    """Return values to trace a mirror with, in place of the inputs of a graph."""
    mode = torch_tracing.fake_mode_of_values(values)
    with mode if mode is not None else contextlib.nullcontext():
        return [stand_in(value) for value in values]


def stand_in(value: Any) -> Any:
    """Return a token for a closed value, or the value itself."""
    if isinstance(value, torch.Tensor):
        return token() if torch_compat.is_wrapper_subclass(value) else value
    return 0 if torch_tracing.is_script_object(value) else value


def token() -> torch.Tensor:
    """Make a placeholder for a closed tensor while a mirror is traced. Nobody reads its element."""
    return torch.empty(())


def describe(node: fx.Node, value: Any, given: Sequence[Pair]) -> None:
    """Record the memory of the closed tensor that a mirror node stands for. given: the tensors that its call is given."""
    if isinstance(value, torch.Tensor) and torch_compat.is_wrapper_subclass(value):
        node.meta["val"] = tuple(in_memory_of(given, part) for part in torch_tracing.plain_tensors(value))


def pairs(dynamo: Any, mine: Any, tracer: Any) -> Iterator[Pair]:
    """Pair the plain tensors in a value. dynamo: the example value. mine: its counterpart while the mirror is traced."""
    for x, own in zip(pytree.tree_leaves(dynamo), pytree.tree_leaves(mine), strict=False):
        if not isinstance(x, torch.Tensor) or not isinstance(own, torch.Tensor):
            continue
        if not torch_compat.is_wrapper_subclass(x):
            yield Pair(dynamo=x, mine=own)
            continue
        node = torch_tracing.traced_node(own, tracer)
        inside = node.meta["val"] if node is not None else ()
        for part, own_part in zip(torch_tracing.plain_tensors(x), inside, strict=False):
            yield Pair(dynamo=part, mine=own_part)


def in_memory_of(given: Sequence[Pair], x: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of Dynamo in the mirror's memory: that of one of `given`, or else its own."""
    memory = mutation.storages_of(x)
    own = [p.mine for p in given if isinstance(p.dynamo, FakeTensor) and memory & mutation.storages_of(p.dynamo)]
    return torch_tracing.untraced(lambda: torch_tracing.in_memory_of(own[0], x)) if own else x
