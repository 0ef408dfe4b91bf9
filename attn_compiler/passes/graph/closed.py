"""Values that a mirror does not look into: tensors that wrap others (DTensor, quantised weights, nested tensors), and script objects.

A node is closed if its value, or one of its inputs, is such a value. In a mirror it is an `opaque` call. What stands there for a tensor
that wraps others is a token, whose `meta["val"]` is a tuple of the plain tensors inside: they say what memory it is in. So the local
tensor of a DTensor is known to be in the DTensor's memory, and a write to the one is a write to the other.
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

#: methods of tensors that wrap others, which plain tensors don't have: each gives its result and writes nothing
_ONLY_READ = frozenset("to_local full_tensor redistribute dequantize wait offsets lengths values".split())

#: where functions come from whose names say what they write (`add_`, `out=`, `inplace=`)
_NAMED_AS_PYTORCH_DOES = ("torch", "_operator", "builtins", "attn_compiler")


class Pair(NamedTuple):
    """A plain tensor as Dynamo has it, and what a mirror has for it."""

    dynamo: torch.Tensor
    mine: torch.Tensor


def is_closed(node: fx.Node) -> bool:
    """Whether a mirror can't look into a Dynamo node, for what its value or one of its inputs is."""
    return holds_closed(node.meta.get("example_value")) or reads_closed(node)


def reads_closed(node: fx.Node) -> bool:
    """Whether one of the node's inputs is a closed value."""
    return any(holds_closed(i.meta.get("example_value")) for i in node.all_input_nodes)


def holds_closed(value: Any) -> bool:
    """Whether a value, or something in a nest of values, is closed."""
    if value is None or type(value) is FakeTensor:
        return False
    return any(
        torch_compat.is_wrapper_subclass(x) or torch_tracing.is_script_object(x) for x in pytree.tree_leaves(value)
    )


def written(node: fx.Node) -> list[fx.Node]:
    """The inputs of a closed node that it may write to: all of them if nothing says what it does."""
    if node.op == "call_method":
        is_known = hasattr(torch.Tensor, str(node.target)) or node.target in _ONLY_READ
    elif isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        is_known = True
    else:
        module = str(getattr(node.target, "__module__", "") or "")
        is_known = node.op == "call_function" and module.split(".")[0] in _NAMED_AS_PYTORCH_DOES
    return bodies.writes(node) if is_known else node.all_input_nodes


def kind(node: fx.Node) -> str | None:
    """What closes a node, in words: "query is a DTensor"."""
    for i in node.all_input_nodes:
        for x in pytree.tree_leaves(i.meta.get("example_value")):
            if isinstance(x, torch.Tensor) and torch_compat.is_wrapper_subclass(x):
                return f"{parameter(node, i)} is {name_of(x)}"
    return None


def is_of_nested(node: fx.Node) -> bool:
    """Whether a node, or one of its inputs, is a nested tensor."""
    values = [x.meta.get("example_value") for x in (node, *node.all_input_nodes)]
    leaves = [x for value in values if holds_closed(value) for x in pytree.tree_leaves(value)]
    return any(isinstance(x, torch.Tensor) and x.is_nested for x in leaves)


def name_of(value: torch.Tensor) -> str:
    """The kind of a tensor that wraps others."""
    return "a nested tensor" if value.is_nested else f"a {type(value).__name__}"


def parameter(node: fx.Node, given: fx.Node) -> str:
    """What the call calls an input, if that is known."""
    names = ("query", "key", "value", "attn_mask") if "scaled_dot_product" in target_name(node) else ()
    by_place = dict(zip(node.args, names, strict=False))
    by_name = {x: name for name, x in node.kwargs.items() if isinstance(x, fx.Node)}
    return by_name.get(given) or by_place.get(given) or str(given.name)


def stand_ins(values: Sequence[Any]) -> list[Any]:
    """What a mirror is traced with in place of the inputs of a graph."""
    mode = torch_tracing.fake_mode_of_values(values)
    with mode if mode is not None else contextlib.nullcontext():
        return [stand_in(value) for value in values]


def stand_in(value: Any) -> Any:
    """A token for a closed value, or the value itself."""
    if isinstance(value, torch.Tensor):
        return token() if torch_compat.is_wrapper_subclass(value) else value
    return 0 if torch_tracing.is_script_object(value) else value


def token() -> torch.Tensor:
    """Stands for a closed tensor while a mirror is traced. Nothing reads what is in it."""
    return torch.empty(())


def describe(node: fx.Node, value: Any, given: Sequence[Pair]) -> None:
    """Say in what memory a closed tensor is that a mirror node stands for. given: what its call is given."""
    if isinstance(value, torch.Tensor) and torch_compat.is_wrapper_subclass(value):
        node.meta["val"] = tuple(in_memory_of(given, part) for part in torch_tracing.plain_tensors(value))


def pairs(dynamo: Any, mine: Any, tracer: Any) -> Iterator[Pair]:
    """The plain tensors in a value. dynamo: the example value. mine: what the mirror has for it while it is traced."""
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
    """A plain tensor that Dynamo has, in the memory that the mirror has for it: that of one of `given`, or else its own."""
    memory = mutation.storages_of(x)
    own = [p.mine for p in given if isinstance(p.dynamo, FakeTensor) and memory & mutation.storages_of(p.dynamo)]
    return torch_tracing.untraced(lambda: torch_tracing.in_memory_of(own[0], x)) if own else x
