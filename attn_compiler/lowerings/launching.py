"""Launches Triton kernels with little work for the host. Imports triton, so it comes late.

Triton's own launch binds and specialises every argument in Python, each time. Here calls whose tensors lie alike share what
follows from that: a compiled kernel, its numbers, the outputs' strides. A further call only fills in addresses. On an H200
machine a launch through `CompiledKernel.__getitem__` took 11 µs, of which the driver's own is 5, and through `run` 6.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import triton

from attn_compiler.lowerings.on_device import Empty, Known
from attn_compiler.lowerings.triton_plan import Tile

#: bytes whose elements a thread may load at once
VECTOR = 16

Grid = tuple[int, int, int]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What one kernel is launched with. tensors: for each parameter that is a tensor its name in the call, None where it is absent.
    numbers: every other parameter. tile: how it is compiled; None: Triton's defaults."""

    grid: Grid
    tensors: Mapping[str, str | None]
    numbers: Mapping[str, Any]
    tile: Tile | None = None


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A compiled kernel and its arguments, all but the addresses. where: position and name of each tensor."""

    kernel: Any
    compiled: Any
    grid: Grid
    values: list[Any]
    where: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Calls of one text whose tensors have the same shapes, strides, dtypes, device and alignment.

    launches: by the identity of the kernel, whose own hash is that of its source. empties: what a call allocates.
    """

    device: torch.device
    launches: dict[tuple[int, str], _Ready] = field(default_factory=dict)
    empties: dict[str, Empty] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

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


_ALIKE: Known[Alike] = Known()


def alike(text: str, tensors: Sequence[torch.Tensor]) -> Alike:
    """What is known of calls like this one."""
    device = tensors[0].device
    key = (text, device, *[(t.shape, t.stride(), t.dtype, t.data_ptr() % VECTOR) for t in tensors])
    found = _ALIKE.get(key)
    return _ALIKE.keep(key, Alike(device=device)) if found is None else found


def launch(
    kernel: Any,
    same: Alike,
    tensors: Mapping[str, torch.Tensor],
    arguments: Callable[[], Arguments],
    part: str = "",
) -> None:
    """Run a kernel on the current device, which has to be the tensors'.

    tensors: of the call, by name. arguments: is asked the first time only, so it may depend on nothing but `same`. part: tells
    launches of one kernel in one call apart.
    """
    ready = same.launches.get((id(kernel), part))
    if ready is None:
        first = _first_launch(kernel, tensors, arguments())
        if first is not None:
            same.launches[id(kernel), part] = first
        return
    values = ready.values.copy()
    for position, name in ready.where:
        values[position] = tensors[name].data_ptr()
    start(ready.compiled, ready.grid, same.device.index, values)


def _first_launch(kernel: Any, tensors: Mapping[str, torch.Tensor], found: Arguments) -> _Ready | None:
    """What further launches need; None if there is nothing to launch, or nothing to keep of it."""
    if 0 in found.grid:
        return None
    given = {name: None if source is None else _bytes(tensors[source]) for name, source in found.tensors.items()}
    options = {} if found.tile is None else {"num_warps": found.tile.warps, "num_stages": found.tile.stages}
    compiled = kernel[found.grid](**given, **found.numbers, **options)
    if compiled is None:  # The interpreter compiles nothing.
        return None
    names = kernel.arg_names
    where = tuple((i, source) for i, name in enumerate(names) if (source := found.tensors.get(name)) is not None)
    values = [found.numbers.get(name) for name in names]
    return _Ready(kernel=kernel, compiled=compiled, grid=found.grid, values=values, where=where)


def start(compiled: Any, grid: Grid, device: int | None, values: Sequence[Any]) -> None:
    """What `CompiledKernel.__getitem__` does, on a device by its index. Profilers that hook into launches get theirs through that.

    values: addresses, numbers and constants in the order of the kernel's parameters.
    """
    x, y, z = grid
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled[grid](*values)
        return
    stream = triton.runtime.driver.active.get_current_stream(device)
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Truth values as bytes: triton reads those without a detour over single bits."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
