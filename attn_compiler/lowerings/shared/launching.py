"""Launches Triton kernels with little work for the host. Imports triton, so it comes late.

Triton's own launch binds and specialises every argument in Python, each time. Here calls whose tensors lie alike share what
follows from that: a compiled kernel, its numbers, the outputs' strides. A further call only fills in addresses, and where nothing
but kernels ran, the whole of it is replayed. On an H200 machine a launch through `CompiledKernel.__getitem__` took 11 µs, of which
the driver's own is 5, and through `run` 6.5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import triton
from triton.runtime._allocation import _allocator
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared import any_size
from attn_compiler.lowerings.shared.compiling import wait_for
from attn_compiler.lowerings.shared.imagined import pointers
from attn_compiler.lowerings.shared.kernel_plan import MOST_BLOCKS
from attn_compiler.lowerings.shared.kernels.tuples import TAKEN
from attn_compiler.lowerings.shared.limits import MAX_GRID
from attn_compiler.lowerings.shared.noting import noter
from attn_compiler.lowerings.shared.on_device import Empty, Known
from attn_compiler.torch_compat import current_cuda_device

#: bytes whose elements a thread may load at once
VECTOR = 16

Grid = tuple[int, int, int]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What one kernel is launched with. tensors: for each parameter that is a tensor its name in the call, None where it is absent.
    numbers: every other parameter, or the members of those that are tuples of `TAKEN`. tile: how it is compiled; None: Triton's
    defaults."""

    grid: Grid
    tensors: Mapping[str, str | None]
    numbers: Mapping[str, Any]
    tile: Tile | None = None


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A compiled kernel and its arguments, all but the addresses. where: position and name of each tensor."""

    kernel: Any
    compiled: Any
    grid: Grid
    values: list[Any]
    where: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A call that allocates and launches, and does nothing else. Tensors are counted: the inputs, then what is allocated.

    launches: a kernel, its grid, its arguments, and of those that are addresses position and tensor. returned: which tensors.
    """

    device: int
    allocate: tuple[Callable[[], torch.Tensor], ...]
    launches: tuple[tuple[Any, Grid, list[Any], tuple[tuple[int, int], ...]], ...]
    returned: tuple[int, ...]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is returned, of inputs that lie like those of the first call."""
        return self.run_at(inputs, [x.data_ptr() for x in inputs])

    def run_at(self, inputs: Sequence[torch.Tensor], addresses: list[int]) -> list[torch.Tensor]:
        """The same for whoever knows the inputs' addresses."""
        device = self.device
        if current_cuda_device() != device:
            with torch.cuda.device(device):
                return self.run_at(inputs, addresses)
        made = [make() for make in self.allocate]
        tensors = [*inputs, *made]
        addresses += [x.data_ptr() for x in made]
        for compiled, grid, first, where in self.launches:
            values = first.copy()
            for position, tensor in where:
                values[position] = addresses[tensor]
            start(compiled, grid, device, values)
        return [tensors[i] for i in self.returned]


@dataclass(kw_only=True)
class Alike:
    """Calls of an op with one text, whose tensors have the same shapes, strides, dtypes, device and alignment.

    launches: by the identity of the kernel, whose own hash is that of its source.
    empties: what a call allocates.
    replay: for further calls, if that is all there is to them.
    any_size: other calls of the text have other sizes, and share their kernels (any_size.py).
    """

    device: torch.device
    any_size: bool = False
    launches: dict[tuple[int, str], Ready] = field(default_factory=dict)
    empties: dict[str, Empty] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    replay: Replay | None = None

    def empty(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """make(), or an unfilled tensor like the one that it gave first. Allocates on the current device."""
        known = self.empties.get(name)
        if known is not None:
            return known.make()
        made = make()
        self.empties[name] = Empty.like(made)
        return made

    def fact(self, name: str, find: Callable[[], T]) -> T:
        """find(), asked once: something that follows from how the tensors lie."""
        if name not in self.facts:
            self.facts[name] = find()
        return cast(T, self.facts[name])

    def keep(self, ran: Sequence[Ready | None], *, inputs: Iterable[str], returned: Iterable[str]) -> None:
        """Replay further calls. ran: what `launch` gave, in order. inputs, returned: names of tensors."""
        # Another thread may be in its first call, too, and find further ones.
        empties = dict(self.empties)
        index = {name: i for i, name in enumerate([*inputs, *empties])}
        if self.device.index is None or any(ready is None for ready in ran):
            return
        launches = [
            (ready.compiled, ready.grid, ready.values, tuple((i, index[name]) for i, name in ready.where))
            for ready in ran
            if ready is not None
        ]
        self.replay = Replay(
            device=self.device.index,
            allocate=tuple(empty.make for empty in empties.values()),
            launches=tuple(launches),
            returned=tuple(index[name] for name in returned),
        )


_ALIKE: Known[Alike] = Known()


def alike(op: str, text: str, tensors: Sequence[torch.Tensor]) -> Alike:
    """What is known of calls like this one: of an op, with that text.

    Of a call whose launches are noted nothing is known or kept: its tensors are stand-ins.
    """
    device = tensors[0].device
    if noter() is not None:
        return Alike(device=device)
    key = (op, text, device, *[(t.shape, t.stride(), t.dtype, t.data_ptr() % VECTOR) for t in tensors])
    found = _ALIKE.get(key)
    return _ALIKE.keep(key, Alike(device=device)) if found is None else found


class Site:
    """Calls of one place in compiled code, where tensors lie the same in every call: after the first one their addresses are all that
    is asked."""

    __slots__ = ("_replay",)

    def __init__(self) -> None:
        self._replay: Replay | None = None

    def again(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """What a further call returns; None where the body has to be called: at first, and where a tensor's address is no multiple of a
        vector."""
        replay = self._replay
        if replay is None:
            return None
        addresses = [x.data_ptr() for x in inputs]
        if any(address % VECTOR for address in addresses):
            return None
        return replay.run_at(inputs, addresses)

    def learn(self, op: str, text: str, inputs: Sequence[torch.Tensor]) -> None:
        """After the body was called."""
        if not any(x.data_ptr() % VECTOR for x in inputs):
            self._replay = alike(op, text, inputs).replay


def launch(
    kernel: Any,
    same: Alike,
    tensors: Mapping[str, torch.Tensor],
    arguments: Callable[[], Arguments],
    part: str = "",
) -> Ready | None:
    """Run a kernel on the current device, which has to be the tensors'. Gives what a further launch needs, if that can be kept.

    tensors: of the call, by name. arguments: is asked the first time only, so it may depend on nothing but `same`. part: tells
    launches of one kernel in one call apart.
    """
    ready = same.launches.get((id(kernel), part))
    if ready is None:
        first = _first_launch(kernel, same, tensors, arguments())
        if first is not None:
            same.launches[id(kernel), part] = first
        return first
    _start(ready, same, tensors)
    return ready


def _start(ready: Ready, same: Alike, tensors: Mapping[str, torch.Tensor]) -> None:
    values = ready.values.copy()
    for position, name in ready.where:
        values[position] = tensors[name].data_ptr()
    start(ready.compiled, ready.grid, same.device.index, values)


def _first_launch(kernel: Any, same: Alike, tensors: Mapping[str, torch.Tensor], found: Arguments) -> Ready | None:
    """What further launches need; None if there is nothing to launch, or nothing to keep of it."""
    if 0 in found.grid:
        return None
    check_grid(found.grid)
    given = {name: None if source is None else _bytes(tensors[source]) for name, source in found.tensors.items()}
    options = {} if found.tile is None else found.tile.launch_options
    names = kernel.arg_names
    numbers = as_taken(names, found.numbers)
    where = tuple((i, source) for i, name in enumerate(names) if (source := found.tensors.get(name)) is not None)
    values = [plain(numbers.get(name)) for name in names]
    is_for_any = same.any_size and isinstance(kernel, JITFunction)
    if is_for_any:
        compiled = compiled_for_any(kernel, found.grid, found.numbers, **given, **options)
    else:
        compiled = _finished(first_launch(kernel, found.grid, **given, **numbers, **options))
    if compiled is None:
        return None
    ready = Ready(kernel=kernel, compiled=compiled, grid=found.grid, values=values, where=where)
    if is_for_any:
        _start(ready, same, tensors)
    return ready


def compiled_for_any(kernel: Any, grid: Grid, numbers: Mapping[str, Any], **named: Any) -> Any:
    """The kernel as Triton compiles it for calls of every size (any_size.py). None where launches are noted."""
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    multiples = any_size.are_multiples(numbers)
    taken = as_taken(kernel.arg_names, numbers).items()
    named |= {name: x if name in constants else any_size.shown(x, multiples=multiples) for name, x in taken}
    return None if _is_noted(kernel, (), named) else _finished(kernel.warmup(grid=grid, **named))


def _is_noted(kernel: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Tell whoever notes launches of this one, which then does not happen. Without anybody: wait until nothing of the kernel is being
    compiled ahead."""
    note = noter()
    if note is None:
        wait_for(kernel)
        return False
    note(kernel, pointers(positional), dict(zip(named, pointers(tuple(named.values())), strict=True)))
    return True


def _finished(compiled: Any) -> Any:
    """The kernel itself, where `triton.AsyncCompileMode` is active and gives what stands for one that is still being compiled: what stands
    for it can't be launched as a kernel can."""
    return compiled.result() if isinstance(compiled, FutureKernel) else compiled


def first_launch(kernel: Any, grid: Grid, *positional: Any, **named: Any) -> Any:
    """Launch a kernel by Triton's own way, which compiles it unless that was done. Gives the compiled kernel; None where there is none: the
    interpreter compiles nothing, and where launches are noted this one is, and does not happen.

    named: options, too, such as num_warps.
    """
    if _is_noted(kernel, positional, named):
        return None
    with _scratch():
        return kernel[grid](*positional, **named)


def as_taken(names: Sequence[str], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers as a kernel with such parameters takes them: members of a tuple that it takes are put into that."""
    made = {name: TAKEN[name] for name in names if name in TAKEN and name not in numbers}
    members = {field for kind in made.values() for field in kind._fields}
    others = {name: value for name, value in numbers.items() if name in names or name not in members}
    return others | {name: kind(**{field: numbers[field] for field in kind._fields}) for name, kind in made.items()}


def plain(value: Any) -> Any:
    """A tuple without its names: seven of them take Triton 3.6's launcher 2.1 µs to read, and with names 4.3."""
    return tuple(plain(member) for member in value) if isinstance(value, tuple) else value


def check_grid(grid: Grid) -> None:
    """Raises ValueError for one that CUDA does not take. Where sizes are known at compile time, `why_not` says so."""
    most = (MOST_BLOCKS, MAX_GRID, MAX_GRID)
    if any(size > limit for size, limit in zip(grid, most, strict=True)):
        raise ValueError(f"a grid of the Triton kernels has at most {most} programs, got {grid}: split the batch")


def start(compiled: Any, grid: Grid, device: int | None, values: Sequence[Any]) -> None:
    """What `CompiledKernel.__getitem__` does, on a device by its index. Profilers that hook into launches get theirs through that.

    values: addresses, numbers and constants in the order of the kernel's parameters.
    """
    x, y, z = grid
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        with _scratch():
            compiled[grid](*values)
        return
    stream = triton.runtime.driver.active.get_current_stream(device)
    if compiled.metadata.global_scratch_size:
        with _scratch():
            compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
    else:
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


@contextlib.contextmanager
def _scratch() -> Iterator[None]:
    """Kernels that make descriptors for the copy engine write them to memory that Triton asks for at each launch. Whoever else has told
    Triton where to get such memory keeps that."""
    before = _allocator.set(_on_current_device)
    try:
        yield
    finally:
        _allocator.reset(before)


def _on_current_device(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Truth values as bytes: triton reads those without a detour over single bits."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
