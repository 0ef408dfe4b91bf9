"""Keys of Dynamo nodes: the function, its numbers, and all that a trace sees of the tensors that it is given."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from attn_compiler.torch_private import symbols as torch_symbols
from attn_compiler.torch_private.op_library import NAMESPACE

_OWN_MODULES = ("torch", "operator", "_operator", "math")
_CONSTANTS = (str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unknown(Exception):
    """A property that a key can't express. Internal: the node is traced."""


@dataclass(kw_only=True, slots=True)
class NodeInputs:
    """The tensors that a Dynamo node is given, in the order of its arguments.

    holders: one tensor for each storage. floats: the nodes of symbolic floats.
    """

    values: list[Any] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    holders: list[torch.Tensor] = field(default_factory=list)
    floats: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Earlier:
    """The value of an earlier call, where one key is made for several calls."""

    index: int


#: returns the node that stands for an argument's value, a tensor or a symbolic float; None if a key can't tell it apart
Stands = Callable[[fx.Node, torch.Tensor | torch.SymFloat], fx.Node | None]


def key_of(node: fx.Node, env: Mapping[fx.Node, Any], inputs: NodeInputs, stands: Stands) -> Hashable:
    """Return the key of a node. Raises Unknown. inputs: empty, and filled in. env: the values of nodes."""
    if not _is_pytorch(node):
        raise Unknown
    arguments = (_key(x, env, inputs, stands) for x in (node.args, node.kwargs))
    return node.op, node.target, *arguments


def key_of_all(calls: Sequence[fx.Node], inputs: NodeInputs) -> Hashable:
    """Return the key of Dynamo nodes that are run one after the other. Raises Unknown."""
    env: dict[fx.Node, Any] = {x: x.meta.get("example_value") for call in calls for x in call.all_input_nodes}
    env.update((call, Earlier(i)) for i, call in enumerate(calls))
    return tuple(key_of(call, env, inputs, lambda node, value: node) for call in calls)


def _is_pytorch(node: fx.Node) -> bool:
    """Return whether a node calls PyTorch or an op of ours: another function may do something else each time."""
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in ("aten", "prims", NAMESPACE)
    module = getattr(node.target, "__module__", None) or ""
    return module.partition(".")[0] in _OWN_MODULES or isinstance(node.target, types.BuiltinFunctionType)


def _key(x: Any, env: Mapping[fx.Node, Any], inputs: NodeInputs, stands: Stands) -> Hashable:
    """Return the key of an argument, and add its tensors to `inputs`."""
    kind = type(x)
    if kind is fx.Node:
        return _input_key(x, env[x], inputs, stands)
    if kind is int or kind is bool:
        return kind, x
    if kind is float:
        return kind, x.hex()
    if isinstance(x, (tuple, list)):
        return (tuple if isinstance(x, tuple) else list), tuple(_key(y, env, inputs, stands) for y in x)
    if isinstance(x, dict):
        return dict, tuple((name, _key(y, env, inputs, stands)) for name, y in x.items())
    if kind is slice:
        return slice, tuple(_key(y, env, inputs, stands) for y in (x.start, x.stop, x.step))
    if isinstance(x, _CONSTANTS):
        return kind, x
    raise Unknown


def _input_key(given: fx.Node, value: Any, inputs: NodeInputs, stands: Stands) -> Hashable:
    kind = type(value)
    if kind is int or kind is bool:
        return kind, value
    if isinstance(value, Earlier):
        return value
    if isinstance(value, torch.SymInt):
        return number(value)
    if isinstance(value, torch.SymFloat):
        return _float_key(given, value, inputs, stands)
    if not isinstance(value, FakeTensor):
        raise Unknown
    node = stands(given, value)
    if node is None:
        raise Unknown
    at = next((i for i, known in enumerate(inputs.values) if known is value), len(inputs.values))
    same = next((i for i, known in enumerate(inputs.nodes) if known is node), at)
    # This comes first: a tensor that is not strided has no storage to ask for.
    told = _tensor_key(value)
    key = at, same, _memory(value, inputs), told
    if at == len(inputs.values):
        inputs.values.append(value)
        inputs.nodes.append(node)
    return key


def _float_key(given: fx.Node, value: torch.SymFloat, inputs: NodeInputs, stands: Stands) -> Hashable:
    """Return the key of a symbolic float. Layers have floats of their own (dropout): it counts which of a call's floats are the same."""
    told, node = torch_symbols.float_key(value), stands(given, value)
    if told is None or node is None:
        raise Unknown
    if node not in inputs.floats:
        inputs.floats.append(node)
    return torch.SymFloat, inputs.floats.index(node), told


def _memory(value: torch.Tensor, inputs: NodeInputs) -> int:
    storage = value.untyped_storage()
    for i, known in enumerate(inputs.holders):
        if known.untyped_storage()._cdata == storage._cdata:
            return i
    inputs.holders.append(value)
    return len(inputs.holders) - 1


def _tensor_key(value: FakeTensor) -> Hashable:
    is_plain = value.layout is torch.strided and not value.is_conj() and not value.is_neg()
    if not is_plain or value.constant is not None:
        raise Unknown
    return (
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_inference(),
        number(value.storage_offset()),
        *map(number, value.shape),
        *map(number, value.stride()),
    )


def number(size: int | torch.SymInt) -> Hashable:
    """Return a size, or a symbolic one's expression with all that is known of its symbols by now.

    Raises Unknown where a symbol is no size of an input: tracing reads what is known of those when it meets them.
    """
    if not isinstance(size, torch.SymInt):
        return size
    found = torch_symbols.expr_of_inputs(size)
    if found is None:
        raise Unknown
    return torch.SymInt, *found
