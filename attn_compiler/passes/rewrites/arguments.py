"""Arguments of nodes as nested tuples of plain data, and back. Different arguments have different data: numbers keep their types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.rewrites.refusing import Unkeyed

#: stands for the index of the current device, so that the processes of a node share records
_CURRENT = "current"
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "size": torch.Size,
    "tuple": tuple,
    "list": list,
    "slice": lambda parts: slice(*parts),
}
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def data_of(x: Any, place: Callable[[fx.Node], int]) -> Any:
    """Return an argument as data. place: the number that stands for a node. Raises Unkeyed."""
    kind = type(x)
    if kind is fx.Node:
        return "node", place(x)
    if x is None or kind is str or kind is bool or kind is int:
        return x
    if kind is float:
        return "float", x.hex()
    if kind is complex:
        return "complex", x.real.hex(), x.imag.hex()
    if kind is torch.Size:
        return "size", *(data_of(y, place) for y in x)
    if isinstance(x, list):
        return "list", *(data_of(y, place) for y in x)
    if kind is tuple:
        return "tuple", *(data_of(y, place) for y in x)
    if isinstance(x, dict):
        return "dict", *((data_of(k, place), data_of(y, place)) for k, y in x.items())
    if kind is slice:
        return "slice", *(data_of(y, place) for y in (x.start, x.stop, x.step))
    if x is ...:
        return ("ellipsis",)
    if kind is torch.device:
        return device_data(x)
    for name, cls in _NAMED.items():
        if kind is cls:
            return name, str(x).removeprefix("torch.")
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Unkeyed("a size is symbolic")
    raise Unkeyed(f"an argument is {kind.__module__}.{kind.__qualname__}")


def value_of(data: Any, nodes: Sequence[fx.Node]) -> Any:
    """Invert `data_of`. nodes: by their numbers."""
    if not isinstance(data, (tuple, list)):
        return data
    kind, *parts = data
    if kind == "node":
        return nodes[parts[0]]
    if kind == "float":
        return float.fromhex(parts[0])
    if kind == "complex":
        return complex(*map(float.fromhex, parts))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([value_of(part, nodes) for part in parts])
    if kind == "dict":
        return {value_of(k, nodes): value_of(x, nodes) for k, x in parts}
    if kind == "ellipsis":
        return ...
    if kind == "device":
        return device_of(data)
    found = getattr(torch, parts[0], None) if kind in _NAMED else None
    if not isinstance(found, _NAMED.get(kind, ())):
        raise Unkeyed(f"a record has the argument {data!r}")
    return found


def device_data(device: torch.device) -> tuple[Any, ...]:
    """Return a device as data. The current device has no number there: each process of a node has another."""
    if device.type == "cuda" and device.index is not None and device.index == _current_device():
        return "device", device.type, _CURRENT
    return "device", device.type, device.index


def device_of(data: Any) -> torch.device:
    """Invert `device_data`."""
    _, kind, index = data
    place = _current_device() if index == _CURRENT else index
    return torch.device(kind) if place is None else torch.device(kind, place)


def _current_device() -> int | None:
    """Return the current CUDA device; None where CUDA is not in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
