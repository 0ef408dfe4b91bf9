"""Tensors without memory, in the layout that the values of a graph will have. Bodies of leaf ops run on them to record launches
(dry_run.py).

They are fake tensors with addresses. A tensor's memory begins at a multiple of whole vectors, as with every allocator of PyTorch, and a
view's address follows from its offset.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from attn_compiler.torch_private import compat as torch_compat, symbols as torch_symbols

#: (symbolic number) -> a possible value, or None
Example = Callable[[Any], Any]


class NoExampleError(Exception):
    """A size without any known value while compiling. Internal: kernels that depend on it are not compiled ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Layout of a tensor: a value of a graph, with this call's numbers in place of symbolic sizes. offset: of its first element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def read(value: torch.Tensor, example: Example = torch_symbols.example) -> TensorLayout:
        """Describe a tensor. Raises NoExampleError."""
        return TensorLayout(
            shape=tuple(_number(size, example) for size in value.shape),
            strides=tuple(_number(stride, example) for stride in value.stride()),
            offset=_number(value.storage_offset(), example),
            dtype=value.dtype,
            device=value.device,
        )

    def made(self) -> torch.Tensor:
        """Make a tensor of this layout. To be called within `without_memory`."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        memory = torch.empty(self.offset + (extent if all(self.shape) else 0), dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """All properties of a tensor that Triton reads to compile a kernel for it."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def described(argument: Any, example: Example = torch_symbols.example) -> Any:
    """Describe an argument of a graph's node by a value that can be compared: tensors by their layout, symbolic numbers by an example.

    Raises NoExampleError.
    """
    if isinstance(argument, torch.Tensor):
        return TensorLayout.read(argument, example)
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(argument, example)
    if isinstance(argument, (list, tuple)):
        return tuple(described(one, example) for one in argument)
    return argument


def made(argument: Any) -> Any:
    """Invert `described`: make a tensor for each layout. To be called within `without_memory`."""
    if isinstance(argument, TensorLayout):
        return argument.made()
    return [made(one) for one in argument] if isinstance(argument, tuple) else argument


def pointers(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Replace every tensor among the arguments of a launch by a `Pointer`. To be called within `without_memory`."""
    return tuple(
        Pointer(dtype=one.dtype, address=one.data_ptr()) if isinstance(one, torch.Tensor) else one for one in arguments
    )


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Make tensors without memory, which have addresses all the same, within the block."""
    with torch_compat.real_tensors(), FakeTensorMode(), Addresses():
        yield


class Addresses(TorchFunctionMode):
    """Mode in which `data_ptr` of a tensor without memory is its offset in bytes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.data_ptr:
            tensor: torch.Tensor = args[0]
            return tensor.storage_offset() * tensor.element_size()
        return func(*args, **(kwargs or {}))


def _number(size: Any, example: Example) -> Any:
    found = example(size)
    if found is None:
        raise NoExampleError(f"{size} is not known while compiling")
    return found
