"""Launch of Triton kernels with little work for the host. Imports triton, so this module is imported late.

Triton's own launch binds and specialises every argument in Python, each time. Here calls whose tensors have the same layout share a
compiled kernel and its numbers (replaying.py), and a further call only fills in addresses. On an H200 machine a launch through
`CompiledKernel.__getitem__` took 11 µs, of which the driver's own is 5, and through `run` 6.5. A replayed one goes to the driver itself
(driver_launch.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime._allocation import _allocator
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared.kernels.tuples import TAKEN
from attn_compiler.lowerings.shared.launching import any_size, cache_keys, driver_launch
from attn_compiler.lowerings.shared.launching.compiling import wait_for
from attn_compiler.lowerings.shared.launching.dry_run import noter, recorder
from attn_compiler.lowerings.shared.launching.dry_tensors import pointers
from attn_compiler.lowerings.shared.launching.replaying import CallCache, Start
from attn_compiler.lowerings.shared.limits.common import MAX_GRID
from attn_compiler.lowerings.shared.limits.triton_releases import FUSION
from attn_compiler.lowerings.shared.parts.kernel_plan import MOST_BLOCKS
from attn_compiler.torch_private.compat import empty_strided

Grid = tuple[int, int, int]
#: makes a kernel's argument from a tensor
Make = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of one kernel launch.

    tensors: for each parameter that is a tensor its name in the call, None where it is absent.
    numbers: every other parameter, or the members of those that are tuples of `TAKEN`.
    tile: compile options; None: Triton's defaults.
    made: for each parameter computed from a tensor, such as a descriptor: the tensor's name in the call, and the function that makes it.
    classes: with symbolic sizes, lengths that are multiples of 16 have a kernel of their own. The Triton family's gradient of q takes 12%
        longer without.
    """

    grid: Grid
    tensors: Mapping[str, str | None]
    numbers: Mapping[str, Any]
    tile: Tile | None = None
    made: Mapping[str, tuple[str, Make]] = field(default_factory=dict)
    classes: bool = True


@dataclass(frozen=True, kw_only=True)
class ReadyKernel:
    """A compiled kernel and its arguments, all but the addresses.

    where: position and name of each tensor whose address is an argument.
    made: position and name of each tensor that an argument is made of, and the function that makes it.
    """

    kernel: Any
    compiled: Any
    grid: Grid
    values: list[Any]
    where: tuple[tuple[int, str], ...]
    made: tuple[tuple[int, str, Make], ...] = ()

    def bound(self, index: Mapping[str, int], device: int) -> Start:
        """Return the launch on a device. See `replaying.Ready`."""
        compiled, grid, first = self.compiled, self.grid, self.values
        where = tuple((position, index[name]) for position, name in self.where)
        made = tuple((position, index[name], make) for position, name, make in self.made)

        def launch_again(tensors: list[torch.Tensor], addresses: list[int]) -> None:
            values = first.copy()
            for position, tensor in where:
                values[position] = addresses[tensor]
            for position, tensor, make in made:
                values[position] = make(tensors[tensor])
            start(compiled, grid, device, values)

        if made:
            return launch_again
        return driver_launch.bound(compiled, grid, device, first, where, len(index), launch_again)


def _again(first: Any, make: Make) -> Make:
    """Return the function that makes further arguments like the first. A descriptor of the copy engine keeps everything but the tensor,
    without another check, since further tensors have the same layout."""
    if not hasattr(first, "base"):
        return make
    kind, fields = type(first), {name: value for name, value in vars(first).items() if name != "base"}

    def describe(tensor: torch.Tensor) -> Any:
        made = object.__new__(kind)
        made.__dict__.update(fields, base=tensor)
        return made

    return describe


def launch(
    kernel: Any,
    same: CallCache,
    tensors: Mapping[str, torch.Tensor],
    arguments: Callable[[], Arguments],
    part: str = "",
) -> ReadyKernel | None:
    """Run a kernel on the current device, which has to be the tensors'. Returns the data for a further launch, if that can be kept.

    tensors: of the call, by name. arguments: called the first time only, so it may depend on nothing but `same`. part: tells
    launches of one kernel in one call apart.
    """
    taker = recorder()
    if taker is not None:
        taker.launched(kernel, tensors, arguments())
        return None
    ready: ReadyKernel | None = same.launches.get((id(kernel), part))
    if ready is None:
        first = _first_launch(kernel, same, tensors, arguments())
        if first is not None:
            same.launches[id(kernel), part] = first
        return first
    _start(ready, same, tensors)
    return ready


def _start(ready: ReadyKernel, same: CallCache, tensors: Mapping[str, torch.Tensor]) -> None:
    values = ready.values.copy()
    for position, name in ready.where:
        values[position] = tensors[name].data_ptr()
    for position, name, make in ready.made:
        values[position] = make(tensors[name])
    start(ready.compiled, ready.grid, same.device.index, values)


def _first_launch(
    kernel: Any, same: CallCache, tensors: Mapping[str, torch.Tensor], found: Arguments
) -> ReadyKernel | None:
    """Launch for the first time. Returns the data for further launches; None if there is nothing to launch, or nothing to keep."""
    if 0 in found.grid:
        return None
    check_grid(found.grid)
    given: dict[str, Any] = {
        name: None if source is None else _bytes(tensors[source]) for name, source in found.tensors.items()
    }
    made = {name: make(tensors[source]) for name, (source, make) in found.made.items()}
    given |= made
    options = {} if found.tile is None else found.tile.launch_options
    names = kernel.arg_names
    numbers = as_taken(names, found.numbers)
    where = tuple((i, source) for i, name in enumerate(names) if (source := found.tensors.get(name)) is not None)
    values = [plain(numbers.get(name)) for name in names]
    is_for_any = same.any_size and isinstance(kernel, JITFunction)
    if is_for_any:
        compiled = compiled_for_any(kernel, found.grid, found.numbers, classes=found.classes, **given, **options)
    else:
        compiled = _finished(first_launch(kernel, found.grid, **given, **numbers, **options))
    if compiled is None:
        return None
    ready = ReadyKernel(
        kernel=kernel,
        compiled=compiled,
        grid=found.grid,
        values=values,
        where=where,
        made=tuple(
            (names.index(name), source, _again(made[name], make)) for name, (source, make) in found.made.items()
        ),
    )
    if is_for_any:
        _start(ready, same, tensors)
    return ready


def compiled_for_any(kernel: Any, grid: Grid, numbers: Mapping[str, Any], *, classes: bool = True, **named: Any) -> Any:
    """Return the kernel as Triton compiles it for calls of every size (any_size.py). None where launches are recorded.

    classes: as in `Arguments`.
    """
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    multiples = classes and any_size.are_multiples(numbers)
    taken = as_taken(kernel.arg_names, numbers).items()
    named |= {name: x if name in constants else any_size.shown(x, multiples=multiples) for name, x in taken}
    named |= FUSION
    return None if _is_noted(kernel, (), named) else _finished(kernel.warmup(grid=grid, **named))


def _is_noted(kernel: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Pass this launch to the recorder of launches, if there is one: the launch then does not happen. Otherwise wait until no variant of
    the kernel is being compiled ahead."""
    note = noter()
    if note is None:
        wait_for(kernel)
        cache_keys.settle(kernel)
        return False
    note(kernel, pointers(positional), dict(zip(named, pointers(tuple(named.values())), strict=True)))
    return True


def _finished(compiled: Any) -> Any:
    """Return the kernel itself, where `triton.AsyncCompileMode` is active and gives a future, which can't be launched as a kernel can."""
    return compiled.result() if isinstance(compiled, FutureKernel) else compiled


def first_launch(kernel: Any, grid: Grid, *positional: Any, **named: Any) -> Any:
    """Launch a kernel by Triton's own way, which compiles it if needed. Returns the compiled kernel; None in the interpreter, which
    compiles nothing, and where launches are recorded: then this one is recorded, and does not happen.

    named: options, too, such as num_warps.
    """
    named |= FUSION
    if _is_noted(kernel, positional, named):
        return None
    with _scratch():
        return kernel[grid](*positional, **named)


def as_taken(names: Sequence[str], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Put numbers into the tuples that a kernel with such parameters takes."""
    made = {name: TAKEN[name] for name in names if name in TAKEN and name not in numbers}
    members = {field for kind in made.values() for field in kind._fields}
    others = {name: value for name, value in numbers.items() if name in names or name not in members}
    return others | {name: kind(**{field: numbers[field] for field in kind._fields}) for name, kind in made.items()}


def plain(value: Any) -> Any:
    """Convert a named tuple to a plain one: seven of them take Triton 3.6's launcher 2.1 µs to read, and with names 4.3."""
    return tuple(plain(member) for member in value) if isinstance(value, tuple) else value


def check_grid(grid: Grid) -> None:
    """Raise ValueError for a grid that CUDA does not take. Where sizes are known at compile time, `why_not` refuses it."""
    most = (MOST_BLOCKS, MAX_GRID, MAX_GRID)
    if any(size > limit for size, limit in zip(grid, most, strict=True)):
        raise ValueError(f"a grid of the Triton kernels has at most {most} programs, got {grid}: split the batch")


def start(compiled: Any, grid: Grid, device: int | None, values: Sequence[Any]) -> None:
    """Launch as `CompiledKernel.__getitem__` does, on a device by its index. With profiler hooks, that method itself is called.

    values: addresses, numbers and constants in the order of the kernel's parameters.
    """
    x, y, z = grid
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        with _scratch():
            compiled[grid](*values)
        return
    stream = triton.runtime.driver.active.get_current_stream(device)
    # The same as `_scratch`, whose context manager takes the host another microsecond.
    before = _allocator.set(_on_current_device) if compiled.metadata.global_scratch_size else None
    try:
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
    finally:
        if before is not None:
            _allocator.reset(before)


@contextlib.contextmanager
def _scratch() -> Iterator[None]:
    """Give Triton memory for descriptors of the copy engine, which kernels write at each launch. The former allocator is restored."""
    before = _allocator.set(_on_current_device)
    try:
        yield
    finally:
        _allocator.reset(before)


def _on_current_device(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return empty_strided((size,), (1,), torch.int8, "cuda")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View truth values as bytes: Triton loads those without a detour over single bits."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
