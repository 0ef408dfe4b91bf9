"""What a Dynamo node is told apart by: its function, its numbers, and all that a trace sees of the tensors that it is given."""

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
    """Something that a key does not tell apart. Internal: the node is traced."""


@dataclass(kw_only=True, slots=True)
class NodeInputs:
    """What tensors a Dynamo node is given, in the order of its arguments. holders: one of those in each memory. floats: the nodes that
    stand for symbolic ones."""

    values: list[Any] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    holders: list[torch.Tensor] = field(default_factory=list)
    floats: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Earlier:
    """Among the values of nodes: what an earlier one of several calls gives, which are told apart together."""

    index: int


#: the node that stands for a tensor or a symbolic float, which is the value of a node that is an argument; None if it is not told apart by
#: what is seen of it
Stands = Callable[[fx.Node, torch.Tensor | torch.SymFloat], fx.Node | None]


def key_of(node: fx.Node, env: Mapping[fx.Node, Any], inputs: NodeInputs, stands: Stands) -> Hashable:
    """Raises Unknown. inputs: empty, and filled in. env: the values of nodes."""
    if not _is_pytorch(node):
        raise Unknown
    arguments = (_key(x, env, inputs, stands) for x in (node.args, node.kwargs))
    return node.op, node.target, *arguments


def key_of_all(calls: Sequence[fx.Node], inputs: NodeInputs) -> Hashable:
    """Of Dynamo nodes that are run one after the other. Raises Unknown."""
    env: dict[fx.Node, Any] = {x: x.meta.get("example_value") for call in calls for x in call.all_input_nodes}
    env.update((call, Earlier(i)) for i, call in enumerate(calls))
    return tuple(key_of(call, env, inputs, lambda node, value: node) for call in calls)


def _is_pytorch(node: fx.Node) -> bool:
    """Whether a node calls PyTorch or an op of ours: somebody else's function may do something else each time."""
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in ("aten", "prims", NAMESPACE)
    module = getattr(node.target, "__module__", None) or ""
    return module.partition(".")[0] in _OWN_MODULES or isinstance(node.target, types.BuiltinFunctionType)


def _key(x: Any, env: Mapping[fx.Node, Any], inputs: NodeInputs, stands: Stands) -> Hashable:
    """What a trace can see of an argument; tensors are added to `inputs`."""
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
    # First: a tensor that is not strided has no memory to ask for.
    told = _tensor_key(value)
    key = at, same, _memory(value, inputs), told
    if at == len(inputs.values):
        inputs.values.append(value)
        inputs.nodes.append(node)
    return key


def _float_key(given: fx.Node, value: torch.SymFloat, inputs: NodeInputs, stands: Stands) -> Hashable:
    """Layers have each a float of their own, such as the probability of their dropout: what counts is which of a call's floats are one."""
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
    """A size, or the expression of a symbolic one with what is known of its symbols by now. Raises Unknown where a symbol is no size of an
    input: what tracing makes of those goes by when it meets them."""
    if not isinstance(size, torch.SymInt):
        return size
    found = torch_symbols.expr_of_inputs(size)
    if found is None:
        raise Unknown
    return torch.SymInt, *found
