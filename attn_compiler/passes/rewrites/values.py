"""Dynamo's values of nodes as plain data, and values made from such data."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from attn_compiler.passes.rewrites import arguments
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.passes.rewrites.sizes import SymbolSizes
from attn_compiler.torch_private import compat as torch_compat, tracing as torch_tracing

#: the most numbers of a known tensor that a key holds
_MOST_NUMBERS = 4096


class GraphValues:
    """The values of one graph and its bodies: tensors and storages are numbered in the order in which they are met."""

    def __init__(self) -> None:
        self.sizes = SymbolSizes()
        self._tensors: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        # Tensors are known by their addresses, so they must stay alive.
        self._held: list[torch.Tensor] = []

    def data_of(self, value: Any) -> Any:
        """Return a value as data. Raises Unkeyed for one that data can't tell completely."""
        if isinstance(value, torch.Tensor):
            return self._tensor_data(value)
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return "float", value.hex()
        if type(value) in (tuple, list, torch.Size):
            return type(value).__name__, *map(self.data_of, value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.sizes.data_of(value)
        if isinstance(value, tuple) and type(value).__module__ == "torch.return_types":
            return type(value).__qualname__, *map(self.data_of, value)
        raise Unkeyed(f"a value of the graph is {type(value).__module__}.{type(value).__qualname__}")

    def _tensor_data(self, value: torch.Tensor) -> Any:
        known = self._tensors.setdefault(id(value), len(self._tensors))
        if known < len(self._held):
            return "same", known
        self._held.append(value)
        wrapped = torch_tracing.wrapped_by_transform(value)
        if wrapped is not None:
            inside, level, axis = wrapped
            return "transformed", level, axis, *self._sizes(value), self._tensor_data(inside)
        if type(value) is not FakeTensor:
            raise Unkeyed(f"a value of the graph is {type(value).__module__}.{type(value).__qualname__}")
        if value.layout is not torch.strided or value.is_nested:
            raise Unkeyed(f"a tensor of the graph is {value.layout}")
        return (
            "tensor",
            str(value.dtype),
            arguments.device_data(value.fake_device),
            *self._sizes(value),
            self._place(value),
            value.requires_grad,
            _is_leaf(value),
            value.is_inference(),
            isinstance(value, torch.nn.Parameter),
            torch_compat.is_view(value),
            value.is_conj(),
            value.is_neg(),
            None if value.constant is None else numbers_of(value.constant),
        )

    def _sizes(self, value: torch.Tensor) -> tuple[Any, ...]:
        shape, stride = (tuple(map(self.sizes.data_of, sizes)) for sizes in (value.shape, value.stride()))
        return shape, stride, self.sizes.data_of(value.storage_offset())

    def _place(self, value: torch.Tensor) -> tuple[int, Any]:
        """Return the number of a tensor's storage, and its size in bytes."""
        storage = value.untyped_storage()
        place = self._places.setdefault(storage._cdata, len(self._places))
        if place == len(self._storages):
            self._storages.append(storage)
        return place, self.sizes.data_of(storage.nbytes())

    # ---- for records ------------------------------------------------------------------------------------------------

    def record(self, value: Any) -> Any:
        """Return the value of a new node as data for `made`. Raises Unkeyed."""
        if value is None or type(value) in (bool, int):
            return value
        if isinstance(value, torch.SymInt):
            return self.sizes.data_of(value)
        if type(value) in (tuple, list):
            return type(value).__name__, *map(self.record, value)
        if type(value) is not FakeTensor or value.constant is not None or value.is_conj() or value.is_neg():
            raise Unkeyed(f"a value that was made is {type(value).__name__}")
        sizes = self._sizes(value)
        return (
            "tensor",
            str(value.dtype).removeprefix("torch."),
            arguments.device_data(value.fake_device),
            *sizes,
            self._place(value),
            value.requires_grad,
        )

    def made(self, data: Any, mode: FakeTensorMode) -> Any:
        """Invert `record`, in the same order of calls after the same values. To be called within `torch_tracing.beside_modes`."""
        if not isinstance(data, (tuple, list)):
            return data
        kind, *parts = data
        if kind == "size":
            return self.sizes.made(data)
        if kind in ("tuple", "list"):
            made = [self.made(part, mode) for part in parts]
            return tuple(made) if kind == "tuple" else made
        dtype, device, shape, stride, offset, (place, size), requires_grad = parts
        if kind != "tensor" or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise Unkeyed(f"a record has the value {data!r}")
        if place == len(self._storages):
            new = torch.empty(self.sizes.made(size), dtype=torch.uint8, device="meta").untyped_storage()
            self._places[new._cdata] = place
            self._storages.append(new)
        empty = torch.empty(0, dtype=getattr(torch, dtype), device="meta")
        lying = (tuple(map(self.sizes.made, sizes)) for sizes in (shape, stride))
        meta = empty.set_(self._storages[place], self.sizes.made(offset), *lying)
        return torch_tracing.fake(mode, meta, arguments.device_of(device)).requires_grad_(requires_grad)


def _is_leaf(value: torch.Tensor) -> bool | None:
    """Return whether a tensor is a leaf; None where autograd refuses every use of it: a view of a tensor that was written to."""
    try:
        return value.is_leaf
    except RuntimeError:
        return None


def numbers_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the numbers of a tensor that is known while compiling. Raises Unkeyed for many."""
    if tensor.numel() > _MOST_NUMBERS:
        raise Unkeyed(f"a tensor of {tensor.numel()} known numbers")
    held = tensor.detach().cpu()
    flat = held.reshape(-1).tolist()
    return str(tensor.dtype), tuple(tensor.shape), tuple(x.hex() if isinstance(x, float) else str(x) for x in flat)
