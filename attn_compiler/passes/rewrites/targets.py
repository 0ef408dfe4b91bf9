"""The functions that nodes call, by name and back.

A name in a key has to tell functions apart. A name in a record is resolved in another process, from a file that somebody else may have
written: so only functions of the tables below are found.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from attn_compiler import lowerings
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.torch_private import tracing as torch_tracing
from attn_compiler.torch_private.op_library import NAMESPACE

#: namespaces of ops that PyTorch or this package defines: versions are in the key
_NAMESPACES = ("aten", "prims", NAMESPACE, "_c10d_functional")
#: namespaces of ops that a record may name
_RESOLVED_NAMESPACES = ("aten", "prims", NAMESPACE)

#: calls with bodies that mean the same in every process, unlike those that hold numbers of a process, such as Triton's kernels
_HIGHER_ORDER = frozenset(
    {
        "autograd_function_apply",
        "cond",
        "flex_attention",
        "invoke_subgraph",
        "tag_activation_checkpoint",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)

#: modules and classes in which a function without a usable path of its own is looked for
_ROOMS: dict[str, Any] = {
    "torch": torch,
    "torch._C": torch._C,
    "torch._C._functorch": torch._C._functorch,
    "torch._C._nn": torch._C._nn,
    "torch._C._autograd": torch._C._autograd,
    "torch._C._special": torch._C._special,  # type: ignore[attr-defined]
    "torch._C._linalg": torch._C._linalg,  # type: ignore[attr-defined]
    "torch._C._fft": torch._C._fft,  # type: ignore[attr-defined]
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": torch.Tensor,
    "operator": operator,
    "math": math,
    "builtins": builtins,
}
#: rooms whose compiled functions a record may name
_RESOLVED_ROOMS = ("torch", "torch._C._nn", "torch.Tensor", "operator")
_COMPILED = (types.BuiltinFunctionType, types.MethodDescriptorType)
#: further functions that a record may name
_RESOLVED: dict[str, Callable[..., Any]] = {
    "torch.amp.autocast_mode._enter_autocast": torch.amp.autocast_mode._enter_autocast,
    "torch.amp.autocast_mode._exit_autocast": torch.amp.autocast_mode._exit_autocast,
    "torch._C._set_grad_enabled": torch._C._set_grad_enabled,
    "torch.nn.functional.softmax": torch.nn.functional.softmax,
}
#: methods of PyTorch that libraries replace to print tensors
_OF_TEXT = frozenset({"__repr__", "__str__", "__format__", "__dir__"})
_OVERLOAD = re.compile(r"op:(\w+)\.(\w+)\.(\w+)")


# ---- to names -----------------------------------------------------------------------------------------------------


def name_of(node: fx.Node) -> str:
    """Return the unique name of the function that a node calls, or of what it stands for. Raises Unkeyed where there is none."""
    if node.op == "call_module":
        raise Unkeyed(f"{node.name} calls a module that Dynamo did not look into")
    if node.op == "call_method":
        _require_own(getattr(torch.Tensor, str(node.target), None), f"torch.Tensor.{node.target}")
    if node.op != "call_function":
        return str(node.target)
    try:
        return _known_name(node.target)
    except TypeError:  # It has no hash.
        raise Unkeyed(f"{node.target!r} is called") from None


@functools.lru_cache(maxsize=4096)
def _known_name(target: Any) -> str:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = f"op:{target}" if isinstance(target, torch._ops.OpOverload) else f"packet:{target}"
        return name if str(target).partition(".")[0] in _NAMESPACES else f"{name} {_schemas(target)}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        name = str(target)
        if name not in _HIGHER_ORDER:
            raise Unkeyed(f"{name} may stand for something else in another process")
        return f"higher order:{name}"
    path = f"{getattr(target, '__module__', None) or ''}.{getattr(target, '__qualname__', '')}"
    name = getattr(target, "__name__", "")
    for found in (*(f"{room}.{name}" for room in _ROOMS), path):
        if name and _at(found) is target:
            _require_own(target, found)
            return f"function:{found}"
    raise Unkeyed(f"{path.strip('.') or repr(target)} is no function of PyTorch's")


def require_untouched() -> None:
    """Raise Unkeyed if Python functions replaced ones that PyTorch calls (multi_head_attention_forward): passes trace the new ones."""
    for name in _ops():
        _require_own(getattr(torch, name), f"torch.{name}")
    for path, room in (("torch.nn.functional", torch.nn.functional), ("torch.Tensor", torch.Tensor)):
        for name, found in vars(room).items():
            if name not in _OF_TEXT:
                _require_own(found, f"{path}.{name}")


@functools.cache
def _ops() -> tuple[str, ...]:
    return tuple(name for name in vars(torch) if hasattr(torch._C._VariableFunctions, name) and name[:1] != "_")


def _require_own(found: Any, path: str) -> None:
    """Raise Unkeyed for a function that replaced one of PyTorch: it may have the original's name and module."""
    while isinstance(found, types.FunctionType):
        if str(found.__globals__.get("__name__")).partition(".")[0] != "torch":
            raise Unkeyed(f"{path} is not PyTorch's own function any more")
        found = getattr(found, "__wrapped__", None)


def _schemas(op: Any) -> tuple[str, ...]:
    """Return the schemas of another library's op, which tell its writes. Its values are in the key already."""
    found = torch_tracing.schemas(op)
    if found is None:
        raise Unkeyed(f"{op} is made of other ops, which may change while its name stays")
    return found


def _at(path: str) -> Any:
    """Return the function at a path from one of the rooms, or from PyTorch itself; None if there is none."""
    room, _, name = path.rpartition(".")
    if room in _ROOMS:
        return getattr(_ROOMS[room], name, None)
    root, *steps = path.split(".")
    found: Any = torch if root == "torch" else None
    for step in steps:
        found = getattr(found, step, None)
    return found


# ---- and back -----------------------------------------------------------------------------------------------------


def resolved(op: str, name: str) -> Any:
    """Return the function of a record's node. Raises Unkeyed for anything that is not in the tables."""
    if op == "placeholder" and name.isidentifier():
        return name
    if op == "call_method" and not name.startswith("_") and hasattr(torch.Tensor, name):
        return name
    found = _resolved_function(name) if op == "call_function" else None
    if found is None:
        raise Unkeyed(f"a record may not have the node {op} {name}")
    return found


@functools.lru_cache(maxsize=4096)
def _resolved_function(name: str) -> Any:
    overload = _OVERLOAD.fullmatch(name)
    if overload is not None:
        namespace, packet, which = overload.groups()
        if namespace not in _RESOLVED_NAMESPACES:
            return None
        if namespace == NAMESPACE and not hasattr(torch.ops.attn_compiler, packet):
            lowerings.define(packet)
        return getattr(getattr(getattr(torch.ops, namespace), packet, None), which, None)
    path = name.removeprefix("function:")
    if path in _RESOLVED:
        return _RESOLVED[path]
    room, _, own = path.rpartition(".")
    found = getattr(_ROOMS[room], own, None) if room in _RESOLVED_ROOMS and not own.startswith("_") else None
    return found if isinstance(found, _COMPILED) else None
