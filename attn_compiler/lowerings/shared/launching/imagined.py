"""Tensors without memory that lie as the values of a graph will: bodies of leaf ops are called with them to note launches (noting.py).

They are fake tensors. Beyond those they have addresses: a tensor's memory begins at a multiple of whole vectors, as every allocator of
PyTorch has it, and a view of it where its offset says.
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

#: (symbolic number) -> a number that it may be, or None
Example = Callable[[Any], Any]


class NoExampleError(Exception):
    """A size that nobody knows while compiling, not even for this call. Internal: what depends on it is not compiled ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lying:
    """How a tensor lies: a value of a graph, with this call's numbers in place of symbolic sizes. offset: of its first element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(value: torch.Tensor, example: Example = torch_symbols.example) -> Lying:
        """Raises NoExampleError."""
        return Lying(
            shape=tuple(_number(size, example) for size in value.shape),
            strides=tuple(_number(stride, example) for stride in value.stride()),
            offset=_number(value.storage_offset(), example),
            dtype=value.dtype,
            device=value.device,
        )

    def made(self) -> torch.Tensor:
        """To be called within `imagining`."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        memory = torch.empty(self.offset + (extent if all(self.shape) else 0), dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """All that Triton looks at of a tensor to compile a kernel for it."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def described(argument: Any, example: Example = torch_symbols.example) -> Any:
    """An argument of a graph's node, as something to compare: values of tensors as `Lying`, symbolic numbers as an example.

    Raises NoExampleError.
    """
    if isinstance(argument, torch.Tensor):
        return Lying.of(argument, example)
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(argument, example)
    if isinstance(argument, (list, tuple)):
        return tuple(described(one, example) for one in argument)
    return argument


def made(argument: Any) -> Any:
    """What `described` described, with tensors in place of `Lying`. To be called within `imagining`."""
    if isinstance(argument, Lying):
        return argument.made()
    return [made(one) for one in argument] if isinstance(argument, tuple) else argument


def pointers(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a launch, with a `Pointer` for every tensor. To be called within `imagining`."""
    return tuple(
        Pointer(dtype=one.dtype, address=one.data_ptr()) if isinstance(one, torch.Tensor) else one for one in arguments
    )


@contextlib.contextmanager
def imagining() -> Iterator[None]:
    """Within the block tensors are made without memory, and have addresses all the same."""
    with torch_compat.real_tensors(), FakeTensorMode(), Addresses():
        yield


class Addresses(TorchFunctionMode):
    """Within it tensors without memory have addresses: where they begin in it, in bytes."""

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
