"""Runs a Gluon kernel's Python in PyTorch, on any device: what it computes, not how threads and barriers share the work.

Its functions get stand-ins for `gl`, `tma` and the like in place of Triton's. Programs run one after another, and in each the
partition that fetches first, into so many stages that none is used twice: nobody has to wait. What a tile holds beyond its tensor
is 0, as the copy engine makes it.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pointer:
    """An address: an offset, or a tensor of them, into what a tensor holds."""

    memory: Tensor
    offset: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)


@dataclass(frozen=True)
class Shared:
    """A tensor in shared memory, or a part of one."""

    memory: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.memory[int(i)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.memory.view(list(shape)))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.permute(list(order)))

    def store(self, value: Tensor) -> None:
        self.memory.copy_(value)

    def load(self, layout: Any) -> Tensor:
        return self.memory.clone()


@dataclass(frozen=True)
class Descriptor:
    """Of a tensor, for tiles of a shape."""

    tensor: Tensor
    tile: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    layout = None
    block_type = types.SimpleNamespace(nbytes=0)

    def slices(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of the tensor, and of the tile, as far as both reach."""
        sizes = [max(min(int(a) + t, s) - int(a), 0) for a, t, s in zip(at, self.tile, self.tensor.shape, strict=True)]
        ours = tuple(slice(int(a), int(a) + size) for a, size in zip(at, sizes, strict=True))
        return ours, tuple(slice(0, size) for size in sizes)


def _bytes(x: Tensor) -> Tensor:
    """Of FP8, which can't be copied into slices everywhere."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _to_shared(descriptor: Descriptor, at: Sequence[Any], barrier: Any, result: Shared) -> None:
    ours, tile = descriptor.slices(at)
    _bytes(result.memory).zero_()
    _bytes(result.memory)[tile] = _bytes(descriptor.tensor)[ours]


def _from_shared(descriptor: Descriptor, at: Sequence[Any], source: Shared) -> None:
    ours, tile = descriptor.slices(at)
    descriptor.tensor[ours] = source.memory[tile]


def _mma(a: Any, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
    a = a.memory if isinstance(a, Shared) else a
    wide = torch.float64 if acc.dtype == torch.int32 else torch.float32
    product = (a.to(wide) @ b.memory.to(wide)).to(acc.dtype)
    return acc + product if use_acc else product


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Any:
    at = torch.as_tensor(pointer.offset)
    if mask is None:
        return pointer.memory[at]
    return torch.where(mask, pointer.memory[torch.where(mask, at, 0)], torch.tensor(other))


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    pointer.memory[pointer.offset[mask]] = value[mask]


def _extreme(function: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What only orders work."""


def _specialise(partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    *computing, fetching = partitions
    for function, arguments in (fetching, *computing):
        function(*arguments)


def _language(program: Sequence[int], programs: Sequence[int]) -> types.SimpleNamespace:
    made: dict[str, Any] = {
        "constexpr": lambda x: x,
        "static_range": range,
        "program_id": lambda axis: torch.tensor(program[axis]),
        "num_programs": lambda axis: programs[axis],
        "allocate_shared_memory": lambda dtype, shape, layout: Shared(torch.empty(list(shape), dtype=dtype)),
        "warp_specialize": _specialise,
        "load": _load,
        "store": _store,
        "minimum": _extreme(torch.minimum),
        "maximum": _extreme(torch.maximum),
        "where": torch.where,
        "exp2": torch.exp2,
        "log": torch.log,
        "max": lambda x, axis: x.amax(axis),
        "sum": lambda x, axis: x.sum(axis),
        "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        "full": lambda shape, value, dtype, layout: torch.full(shape, float(value), dtype=dtype),
        "abs": torch.abs,
        "arange": lambda first, end, layout: torch.arange(first, end),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "inline_asm_elementwise": lambda asm, constraints, args, **_: torch.tanh(*args) if "tanh" in asm else args[0],
        "float32": torch.float32,
        "int32": torch.int32,
        "int64": torch.int64,
        "int8": torch.int8,
        "float8e4nv": torch.float8_e4m3fn,
    }
    layouts = ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout")
    return types.SimpleNamespace(**made, **{name: lambda *args, **kwargs: None for name in layouts})


def run(module: Any, kernel: str, grid: Sequence[int], arguments: Mapping[str, Any]) -> None:
    """Every program of a kernel of a module. arguments: by its parameters; tensors for pointers, `Descriptor`s."""
    given = {name: Pointer(x.view(-1)) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    functions = {name: value.fn for name, value in vars(module).items() if hasattr(value, "fn")}
    constants = {
        name: getattr(value, "value", value)
        for name, value in vars(module).items()
        if name.isupper() or name[:1] == "_"
    }
    barrier = types.SimpleNamespace(
        init=_nothing, expect=_nothing, wait=_nothing, arrive=_nothing, MBarrierLayout=_nothing
    )
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=_to_shared, async_copy_shared_to_global=_from_shared, store_wait=_nothing
    )
    for program in itertools.product(*map(range, grid)):
        scope: dict[str, Any] = {name: x for name, x in constants.items() if not callable(x)}
        scope |= {"gl": _language(program, grid), "mbarrier": barrier, "tma": copies, "range": range}
        scope |= {
            "warpgroup_mma": _mma,
            "warpgroup_mma_wait": lambda count, deps: deps[0],
            "fence_async_shared": _nothing,
            "_barrier": _nothing,
        }
        for name, function in functions.items():
            scope[name] = types.FunctionType(
                function.__code__, scope, name, function.__defaults__, function.__closure__
            )
        scope[kernel](**given)
