"""Runs a Gluon kernel's Python in PyTorch, on any device: what it computes, and who waits for whom.

Its functions get stand-ins for `gl`, `tma` and the like in place of Triton's. Programs run one after another, or at once where they wait
for each other, the partitions of one as threads that meet at barriers in shared memory: a tile that is read before it came, or
overwritten before it was read, gives wrong numbers or nobody's turn ever comes, which is an error. What a tile holds beyond its tensor is
0, as the copy engine makes it. What the copy engine and the tensor cores touch needs a fence after threads touched it (proxies.py).
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.lowerings.shared.kernels.proxies import Proxies

#: of the programs that run
_PROXIES = Proxies()


@dataclass(frozen=True)
class Pointer:
    """An address: an offset, or a tensor of them, into what a tensor holds."""

    memory: Tensor
    offset: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def to(self, dtype: torch.dtype) -> Pointer:
        """As a number. Bytes alone are read by those."""
        return self


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

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory.narrow(dim, start, length))

    def store(self, value: Tensor) -> None:
        self.memory.copy_(value)
        _PROXIES.touch(self.memory, writes=True)

    def load(self, layout: Any) -> Tensor:
        _PROXIES.touch(self.memory, writes=False)
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

    @property
    def block_type(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(nbytes=math.prod(self.tile) * self.tensor.element_size())

    def slices(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Of the tensor, and of the tile, as far as both reach. Raises IndexError before the first element: on an H200 that was an illegal
        instruction."""
        if min(map(int, at)) < 0:
            raise IndexError(f"a tile at {tuple(map(int, at))}")
        sizes = [max(min(int(a) + t, s) - int(a), 0) for a, t, s in zip(at, self.tile, self.tensor.shape, strict=True)]
        ours = tuple(slice(int(a), int(a) + size) for a, size in zip(at, sizes, strict=True))
        return ours, tuple(slice(0, size) for size in sizes)


def _descriptor(base: Pointer, shape: Any, strides: Any, tile: Any, layout: Any) -> Descriptor:
    sizes, steps = [int(x) for x in shape], [int(x) for x in strides]
    if any(step * base.memory.element_size() % 16 for step in steps[:-1]):
        raise ValueError(f"the copy engine takes strides of whole vectors, got {steps}")
    first = base.memory.storage_offset() + int(base.offset)
    if first * base.memory.element_size() % 16:
        raise ValueError(f"the copy engine takes addresses of whole vectors, got one of {first} elements")
    return Descriptor(base.memory.as_strided(sizes, steps, first), tuple(tile))


#: seconds that nobody should have to wait for another partition
PATIENCE = 20.0


@dataclass
class Barrier:
    """An mbarrier: its phase ends when so many have arrived, and all bytes that it expects."""

    count: int = 0
    arrived: int = 0
    expected: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def arrive(self) -> None:
        self._count(arrived=1, expected=0)

    def expect(self, size: int) -> None:
        """Arrive, too. size: bytes."""
        self._count(arrived=1, expected=size)

    def receive(self, size: int) -> None:
        self._count(arrived=0, expected=-size)

    def _count(self, *, arrived: int, expected: int) -> None:
        with self.changed:
            self.arrived, self.expected = self.arrived + arrived, self.expected + expected
            if self.arrived == self.count and self.expected == 0:
                self.arrived, self.phase = 0, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        """For the end of the last phase of this parity. Raises TimeoutError."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, timeout=PATIENCE):
                raise TimeoutError(f"phase {self.phase} never ended: {self.arrived} of {self.count} arrived")


@dataclass(frozen=True)
class Barriers:
    """Those that were allocated together."""

    each: tuple[Barrier, ...]

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = count


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared | Barriers | Barrier:
    if dtype == torch.int64 and len(shape) == 1:
        return Barrier()
    if dtype == torch.int64:
        return Barriers(tuple(Barrier() for _ in range(shape[0])))
    return Shared(torch.zeros(list(shape), dtype=torch.uint8).to(dtype))


def _bytes(x: Tensor) -> Tensor:
    """Of FP8, which can't be copied into slices everywhere."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _to_shared(descriptor: Descriptor, at: Sequence[Any], barrier: Barrier, result: Shared) -> None:
    ours, tile = descriptor.slices(at)
    _PROXIES.check(result.memory, writes=True)
    _bytes(result.memory).zero_()
    _bytes(result.memory)[tile] = _bytes(descriptor.tensor)[ours]
    barrier.receive(descriptor.block_type.nbytes)


def _from_shared(descriptor: Descriptor, at: Sequence[Any], source: Shared) -> None:
    ours, tile = descriptor.slices(at)
    _PROXIES.check(source.memory, writes=False)
    descriptor.tensor[ours] = source.memory[tile]


def _reinterpreted(tile: Shared, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    """Of its own memory: elements that take more bytes here than on a GPU would not fit."""
    return Shared(torch.zeros(list(shape), dtype=dtype))


def _add_from_shared(descriptor: Descriptor, at: Sequence[Any], source: Shared) -> None:
    ours, tile = descriptor.slices(at)
    _PROXIES.check(source.memory, writes=False)
    descriptor.tensor[ours] += source.memory[tile]


#: what programs that run at once change together, and when one has
_MEMORY = threading.Condition()


def _atomic_add(pointer: Pointer, more: int, sem: str = "acq_rel") -> Tensor:
    with _MEMORY:
        before = pointer.memory[pointer.offset].clone()
        pointer.memory[pointer.offset] += more
        _MEMORY.notify_all()
        return before


def _await_number(pointer: Pointer, least: Any) -> Any:
    """Raises TimeoutError."""
    with _MEMORY:
        if not _MEMORY.wait_for(lambda: bool(pointer.memory[pointer.offset] >= least), timeout=PATIENCE):
            raise TimeoutError(f"{pointer.memory[pointer.offset]} never became {least}")
    return least


def _mma(a: Any, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
    for operand in (a, b):
        if isinstance(operand, Shared):
            _PROXIES.check(operand.memory, writes=False)
    a = a.memory if isinstance(a, Shared) else a
    wide = torch.float64 if acc.dtype == torch.int32 else torch.float32
    product = (a.to(wide) @ b.memory.to(wide)).to(acc.dtype)
    return acc + product if use_acc else product


def _waited(pendings: int, deps: Sequence[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Any:
    at = torch.as_tensor(pointer.offset)
    if mask is None:
        return pointer.memory[at]
    mask = torch.as_tensor(mask)
    return torch.where(mask, pointer.memory[torch.where(mask, at, 0)], torch.tensor(other))


def _store(pointer: Pointer, value: Tensor, mask: Any = True) -> None:
    mask = torch.as_tensor(mask).broadcast_to(value.shape)
    pointer.memory[pointer.offset[mask]] = value[mask].to(pointer.memory.dtype)


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), a, b)


def _extreme(function: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


@dataclass(frozen=True)
class Bits:
    """Numbers that are to be seen as others of as many bits."""

    memory: Tensor

    def to(self, dtype: torch.dtype, bitcast: bool) -> Tensor:
        return self.memory.view(dtype)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What only orders work."""


def _partition(function: Callable[..., None], *arguments: Any) -> None:
    # Whether autograd watches is each thread's own.
    try:
        torch.no_grad()(function)(*arguments)
    finally:
        _PROXIES.fence()


def _specialise(partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    with ThreadPoolExecutor(len(partitions)) as pool:
        running = [pool.submit(_partition, function, *arguments) for function, arguments in partitions]
        wait(running, return_when=FIRST_EXCEPTION)
        for each in running:
            each.result()


def _assembly(meeting: Any, asm: str, constraints: str, args: Sequence[Any], dtype: Any, **_: Any) -> Any:
    first, *further = args
    if "bar.sync" in asm:
        meeting.wait(PATIENCE)
    if "ld.acquire.gpu" in asm:
        return _await_number(first, further[0])
    if "sub.f32" in asm:
        return first.to(dtype[0]), first - first.to(dtype[0])  # type: ignore[index]
    if "x2.f32 $0" in asm:
        return first.to(dtype)
    if "tanh" in asm:
        return torch.tanh(first)
    if "ballot" in asm:
        return _ballot(first, further[0])
    if "div" in asm:
        return first / further[0]
    if "mov.b32" in asm and constraints == "=f,r":
        return first.view(torch.float32)
    for kind, dtype in (("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)):
        if kind in asm:
            most = torch.finfo(dtype).max
            return Bits(first.clamp(-most, most).to(dtype))
    return first


def _ballot(bytes_of: Any, left: Tensor) -> Tensor:
    """int32: 32 bytes each, as bits."""
    lanes = torch.arange(32)
    at = bytes_of.offset[:, None] + lanes
    inside = lanes < left[:, None]
    found = torch.where(inside, bytes_of.memory[torch.where(inside, at, 0)], 0) != 0
    return (found.long() << lanes).sum(1).to(torch.int32)


def _language(program: Sequence[int], programs: Sequence[int]) -> types.SimpleNamespace:
    made: dict[str, Any] = {
        "constexpr": lambda x: x,
        "static_range": range,
        "cdiv": lambda a, b: (a + b - 1) // b,
        "program_id": lambda axis: torch.tensor(program[axis]),
        "num_programs": lambda axis: programs[axis],
        "allocate_shared_memory": _allocate,
        "warp_specialize": _specialise,
        "load": _load,
        "store": _store,
        "atomic_add": _atomic_add,
        "minimum": _extreme(torch.minimum),
        "maximum": _extreme(torch.maximum),
        "where": _where,
        "exp2": torch.exp2,
        "log": torch.log,
        "log2": torch.log2,
        "max": lambda x, axis: x.amax(axis),
        "sum": lambda x, axis: x.sum(axis),
        "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        "full": lambda shape, value, dtype, layout: torch.full(shape, float(value), dtype=dtype),
        "abs": torch.abs,
        "arange": lambda first, end, layout: torch.arange(first, end),
        "multiple_of": lambda x, of: x,
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "inline_asm_elementwise": functools.partial(_assembly, threading.Barrier(2)),
        **{name: getattr(torch, name) for name in ("uint8", "bfloat16", "float32", "int32", "int64", "int8")},
        "float8e4nv": torch.float8_e4m3fn,
    }
    layouts = (
        "NVMMADistributedLayout",
        "SliceLayout",
        "DotOperandLayout",
        "DistributedLinearLayout",
        "BlockedLayout",
        "SwizzledSharedLayout",
    )
    shared = types.SimpleNamespace(get_default_for=_nothing)
    return types.SimpleNamespace(
        **made, NVMMASharedLayout=shared, **{name: lambda *args, **kwargs: None for name in layouts}
    )


def _modules_of(module: Any) -> dict[str, Any]:
    """A module, and those that it has jitted functions of, and these in turn."""
    found, left = {}, [module]
    while left:
        each = left.pop()
        if each.__name__ not in found:
            found[each.__name__] = each
            left += [sys.modules[x.fn.__module__] for x in vars(each).values() if hasattr(x, "fn")]
    return found


def scope(module: Any, program: Sequence[int], programs: Sequence[int]) -> dict[str, Any]:
    """A module's functions, and those of modules that it has functions of, as one program runs them; and its named tuples."""
    barrier = types.SimpleNamespace(
        init=_init, expect=Barrier.expect, wait=Barrier.wait, arrive=Barrier.arrive, MBarrierLayout=_nothing
    )
    copies = types.SimpleNamespace(store_wait=_nothing, make_tensor_descriptor=_descriptor)
    language = _language(program, programs)
    given: dict[str, Any] = {"gl": language, "tl": language, "mbarrier": barrier, "tma": copies, "range": range}
    given |= {"warpgroup_mma": _mma, "warpgroup_mma_wait": _waited}
    given |= {"async_load": _to_shared, "async_store": _from_shared, "add_from_shared": _add_from_shared}
    given |= {"reinterpret": _reinterpreted, "members": lambda how: how, "of_tile": lambda condition: condition}
    given |= {"fence_async_shared": _PROXIES.fence, "barrier_of_threads": _nothing}
    modules = _modules_of(module)
    scopes = {name: dict(given) for name in modules}
    for each, own in ((modules[name], scopes[name]) for name in modules):
        for name, x in vars(each).items():
            if hasattr(x, "fn"):
                functions = scopes[x.fn.__module__]
                own[name] = types.FunctionType(x.fn.__code__, functions, name, x.fn.__defaults__, x.fn.__closure__)
            elif hasattr(x, "value"):
                own[name] = x.value
            elif hasattr(x, "_fields"):
                own[name] = x
    return scopes[module.__name__]


def run(module: Any, kernel: str, grid: Sequence[int], arguments: Mapping[str, Any], *, together: bool = False) -> None:
    """Every program of a kernel of a module. arguments: by its parameters; tensors for pointers, `Descriptor`s. together: at once."""
    given = {name: Pointer(x.view(-1)) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    programs = [scope(module, program, grid)[kernel] for program in itertools.product(*map(range, grid))]
    with ThreadPoolExecutor(len(programs) if together else 1) as pool:
        for each in [pool.submit(torch.no_grad()(program), **given) for program in programs]:
            each.result()
