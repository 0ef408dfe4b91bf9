"""Replay of the launches of a flash_attn function without the function, which takes the host ten times as long as a launch.

A recording is a list of compiled kernels with their arguments: constants, names of the call's tensors, and allocations between launches.
It is replayed as the launches of every family are (shared/launching/replaying.py), except that its arguments are tensors, with sequences
before heads. It is made only where the function did nothing but allocate, take views and launch: copies and other computations could not
be replayed. It is kept only if it gives the function's results.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_compiler.lowerings.shared.launching.on_device import Empty
from attn_compiler.lowerings.shared.launching.replaying import Start
from attn_compiler.torch_private import compat as torch_compat

Kernel = Callable[..., Any]
Tensors = Mapping[str, Tensor]

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.empty_like.default)
_ZEROS = (_aten.zeros.default, _aten.zeros_like.default)
_VIEWS = (_aten.detach.default, _aten.transpose.int, _aten.alias.default)

#: share of the largest element: errors from the order of sums in bfloat16. Any other error is far larger
_NOISE = 0.02

_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """One allocation."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool

    def empty(self, device: str) -> Empty:
        make = torch_compat.allocator(self.size, self.stride, self.dtype, device)
        return Empty(make=lambda: make().zero_()) if self.zeros else Empty(make=make)


#: a kernel, its arguments, position and count of each tensor, and position, type and items of each tuple
_Counted = tuple[Kernel, list[Any], list[tuple[int, int]], list[tuple[int, Callable[..., Any], tuple[int | None, ...]]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """One launch. values: the arguments, None for tensors. where: position and name of each tensor. tuples: position, type and items of
    each tuple that holds some; an item is a name, or None."""

    kernel: Kernel
    values: list[Any]
    where: tuple[tuple[int, str], ...]
    tuples: tuple[tuple[int, Callable[..., Any], tuple[str | None, ...]], ...]

    def counted(self, index: Mapping[str, int]) -> _Counted:
        """Return the launch with indices of tensors in place of their names."""
        where = [(position, index[name]) for position, name in self.where]
        tuples = [
            (position, kind, tuple(None if item is None else index[item] for item in items))
            for position, kind, items in self.tuples
        ]
        return self.kernel, self.values, where, tuples


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Allocations and launches of a call. made: the allocations, by name. launches: in order. device: its type."""

    made: Mapping[str, _Made]
    launches: tuple[_Launch, ...]
    device: str

    @property
    def empties(self) -> dict[str, Empty]:
        """Allocations of a replay besides the outputs."""
        return {name: made.empty(self.device) for name, made in self.made.items()}

    def bound(self, index: Mapping[str, int], device: int) -> Start:
        """See `replaying.Ready`."""
        made = {index[name] for name in self.made}
        launches = [launch.counted(index) for launch in self.launches]

        def launch_again(tensors: list[Tensor], addresses: list[int]) -> None:
            read = [x if i in made else as_read(x) for i, x in enumerate(tensors)]
            for kernel, first, where, tuples in launches:
                values = first.copy()
                for position, tensor in where:
                    values[position] = read[tensor]
                for position, kind, items in tuples:
                    values[position] = kind(*(None if item is None else read[item] for item in items))
                kernel(*values)

        return launch_again


def as_read(x: Tensor) -> Tensor:
    """Return a leaf op's tensor in flash_attn's layout, sequences before heads. DLPack refuses a tensor that requires a gradient."""
    plain = x.detach() if x.requires_grad else x
    return plain.transpose(1, 2) if plain.dim() == 4 else plain


def gives(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether a replay gave the function's results, up to the order of sums. Waits for the GPU."""
    return all(_is_alike(one, other) for one, other in zip(found, expected, strict=True))


def _is_alike(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.float(), expected.float()
    size = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else 0.0
    return torch.allclose(found, expected, rtol=0.0, atol=_NOISE * float(size), equal_nan=True)


@dataclass(kw_only=True)
class Watch:
    """Events while a function of flash_attn's runs."""

    launched: list[tuple[Kernel, tuple[Any, ...]]] = field(default_factory=list)
    made: dict[int, _Made] = field(default_factory=dict)
    computed: bool = False

    def recording(self, given: Tensors, results: Tensors) -> Recording | None:
        """Return a recording to replay with tensors of the same names as `given`; None if names are ambiguous. results: tensors that the
        function allocated and returned, which get these names."""
        names = {tensor.data_ptr(): name for name, tensor in given.items()}
        if self.computed or len(names) < len(given):
            return None
        names |= {tensor.data_ptr(): name for name, tensor in results.items()}
        for index, address in enumerate(self.made):
            names.setdefault(address, f"made {index}")
        try:
            launches = tuple(_template(kernel, arguments, names) for kernel, arguments in self.launched)
        except LookupError:
            return None
        used = {name for launch in launches for name in _names(launch)}
        made = {names[address]: one for address, one in self.made.items() if names[address] in used - given.keys()}
        device = next(iter(given.values())).device.type
        return Recording(made=made, launches=launches, device=device)


def _template(kernel: Kernel, arguments: Sequence[Any], names: Mapping[int, str]) -> _Launch:
    """Replace tensors by names. Raises LookupError for a tensor that has no name."""
    values, where, tuples = [], [], []
    for position, value in enumerate(arguments):
        if isinstance(value, Tensor):
            where.append((position, names[value.data_ptr()]))
        elif isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
            if not all(item is None or isinstance(item, Tensor) for item in value):
                raise LookupError(f"a tuple of tensors and other things: {value}")
            items = tuple(None if item is None else names[item.data_ptr()] for item in value)
            tuples.append((position, type(value), items))
        values.append(None if isinstance(value, Tensor) else value)
    for position, _, _ in tuples:
        values[position] = None
    return _Launch(kernel=kernel, values=values, where=tuple(where), tuples=tuple(tuples))


def _names(launch: _Launch) -> Iterator[str]:
    yield from (name for _, name in launch.where)
    yield from (item for _, _, items in launch.tuples for item in items if item is not None)


@contextlib.contextmanager
def watching(functions: Sequence[Any]) -> Iterator[Watch]:
    """Record allocations on this thread, and launches of kernels from the functions' caches."""
    watch = Watch()
    with _lock, contextlib.ExitStack() as stack:
        for function in functions:
            stack.enter_context(_noting(function, watch))
        with _Operations(watch):
            yield watch


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY or func in _ZEROS:
            made = _Made(size=tuple(result.shape), stride=result.stride(), dtype=result.dtype, zeros=func in _ZEROS)
            self._watch.made[result.data_ptr()] = made
        elif func not in _VIEWS:
            self._watch.computed = True
        return result


class _Cache:
    """A stand-in for a function's cache of compiled kernels, whose kernels note their launches."""

    def __init__(self, kept: Any, watch: Watch) -> None:
        self._kept, self._watch, self._thread = kept, watch, threading.get_ident()

    def __contains__(self, key: Any) -> bool:
        return key in self._kept

    def __setitem__(self, key: Any, kernel: Kernel) -> None:
        self._kept[key] = kernel

    def __getitem__(self, key: Any) -> Kernel:
        kernel: Kernel = self._kept[key]
        if threading.get_ident() != self._thread:
            return kernel

        def noted(*arguments: Any) -> Any:
            self._watch.launched.append((kernel, arguments))
            return kernel(*arguments)

        return noted


@contextlib.contextmanager
def _noting(function: Any, watch: Watch) -> Iterator[None]:
    kept = function.compile_cache
    function.compile_cache = _Cache(kept, watch)
    try:
        yield
    finally:
        function.compile_cache = kept
