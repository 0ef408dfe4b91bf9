"""What a Dynamo node is told apart by: its function, its numbers, and all that a trace sees of the tensors that it is given."""

from __future__ import annotations

import types
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from attn_compiler import torch_tracing

_OWN_MODULES = ("torch", "operator", "_operator", "math")
_CONSTANTS = (str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unknown(Exception):
    """Something that a key does not tell apart. Internal: the node is traced."""


@dataclass(kw_only=True, slots=True)
class NodeInputs:
    """What a Dynamo node is given, in the order of its arguments."""

    values: list[Any] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)


def key_of(node: fx.Node, env: dict[fx.Node, Any], inputs: NodeInputs, tracer: Any) -> Hashable:
    """Raises Unknown. inputs: empty, and filled in. env: what was traced so far."""
    if not _is_pytorch(node):
        raise Unknown
    arguments = (_key(x, env, inputs, tracer) for x in (node.args, node.kwargs))
    return node.op, node.target, *arguments


def _is_pytorch(node: fx.Node) -> bool:
    """Whether a node calls PyTorch: somebody else's function may do something else each time."""
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in ("aten", "prims")
    module = getattr(node.target, "__module__", None) or ""
    return module.partition(".")[0] in _OWN_MODULES or isinstance(node.target, types.BuiltinFunctionType)


def _key(x: Any, env: dict[fx.Node, Any], inputs: NodeInputs, tracer: Any) -> Hashable:
    """What a trace can see of an argument; tensors are added to `inputs`."""
    kind = type(x)
    if kind is fx.Node:
        return _input_key(env[x], inputs, tracer)
    if kind is int or kind is bool:
        return kind, x
    if kind is float:
        return kind, x.hex()
    if isinstance(x, (tuple, list)):
        return (tuple if isinstance(x, tuple) else list), tuple(_key(y, env, inputs, tracer) for y in x)
    if isinstance(x, dict):
        return dict, tuple((name, _key(y, env, inputs, tracer)) for name, y in x.items())
    if kind is slice:
        return slice, tuple(_key(y, env, inputs, tracer) for y in (x.start, x.stop, x.step))
    if isinstance(x, _CONSTANTS):
        return kind, x
    raise Unknown


def _input_key(value: Any, inputs: NodeInputs, tracer: Any) -> Hashable:
    kind = type(value)
    if kind is int or kind is bool:
        return kind, value
    if not isinstance(value, FakeTensor):
        raise Unknown
    node = torch_tracing.traced_node(value, tracer)
    if node is None:
        raise Unknown
    at = next((i for i, known in enumerate(inputs.values) if known is value), len(inputs.values))
    same = next((i for i, known in enumerate(inputs.nodes) if known is node), at)
    # First: a tensor that is not strided has no memory to ask for.
    told = _tensor_key(value, tracer)
    key = at, same, _memory(value, inputs), told
    if at == len(inputs.values):
        inputs.values.append(value)
        inputs.nodes.append(node)
    return key


def _memory(value: torch.Tensor, inputs: NodeInputs) -> int:
    storage = value.untyped_storage()
    for i, known in enumerate(inputs.storages):
        if known._cdata == storage._cdata:
            return i
    inputs.storages.append(storage)
    return len(inputs.storages) - 1


def _tensor_key(value: FakeTensor, tracer: Any) -> Hashable:
    is_plain = value.layout is torch.strided and not value.is_conj() and not value.is_neg()
    if not is_plain or value.constant is not None or torch_tracing.traced_constant(value, tracer) is not None:
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


def number(size: int | torch.SymInt) -> int:
    """Raises Unknown for a symbolic size: tracing names nodes for those, by when it first meets them."""
    if isinstance(size, torch.SymInt):
        raise Unknown
    return size
