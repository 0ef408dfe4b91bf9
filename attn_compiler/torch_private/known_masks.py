"""Facts about tensors that compiled code returned: a mask from one graph stays known in another one.

A tensor is known as long as it is the very object that was returned, its memory layout is unchanged, and PyTorch counted no write to it. On
a CPU its memory must not have been written in any other way, either (torch_writes.py). A view or a copy is another object, and unknown.

Compiled code takes the address of its inputs, as a writer would. So memory is not watched while a graph's code reads it, and is watched
again when no call reads it any more. In between nothing is known. A backward reads it, too, and it is watched again after that.

A lookup waits for no device. An entry is removed with its tensor. Threads: each entry is set and removed by one dictionary operation, and
holds a reference to its tensor.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index, Load, Size
from attn_compiler.torch_private import writes as torch_writes

#: name of the known tensor in loads of its own elements
ITSELF = "itself"


@dataclass(frozen=True, kw_only=True)
class Known:
    """The elements of a tensor.

    element: over `indices(dims)`. It may load other elements of the tensor itself. Its sizes are those of the tensor's axes.
    dims: the rank of the tensor. if_square: the facts hold only where the tensor has as many keys as queries.
    """

    element: Expr
    dims: int
    if_square: bool = field(default=False, compare=False)

    @property
    def words(self) -> str:
        return ix.text(self.element)


@dataclass(kw_only=True, eq=False, slots=True)
class _Entry:
    """Facts about one tensor.

    watched: its memory is watched (torch_writes.py).
    readers: the number of running calls of compiled code that read it.
    holds: it was known when the first of them began.
    """

    tensor: weakref.ref[torch.Tensor]
    writes: int
    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    known: Known
    watched: bool
    readers: int = 0
    holds: bool = False

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is the known one, unchanged."""
        return (
            self.tensor() is tensor
            and (not self.watched or torch_writes.is_unwritten(tensor))
            and self.writes == tensor._version
            and self.address == torch_writes.address(tensor)
            and self.strides == tensor.stride()
            and self.shape == tensor.shape
            and self.dtype == tensor.dtype
        )


def indices(dims: int) -> tuple[Index, ...]:
    """Return the indices of a known element."""
    return tuple(Index(f"i{axis}") for axis in range(dims))


def size_of_axis(axis: int) -> Size:
    return Size(f"n{axis}")


def own_element(at: tuple[Expr, ...], kind: str) -> Expr:
    """Load an element of the known tensor itself."""
    return Load(ITSELF, at, kind)


_entries: dict[int, _Entry] = {}


def remember(tensor: torch.Tensor, known: Known) -> None:
    """Keep facts about a tensor for as long as it lives and is not written to."""
    if known.if_square and tensor.shape[-2] != tensor.shape[-1]:
        return
    watched = torch_writes.is_watchable(tensor)
    if tensor.is_inference() or (watched and not torch_writes.watch(tensor)):
        return
    key = id(tensor)
    entry = _Entry(
        tensor=weakref.ref(tensor, functools.partial(_forget, key)),
        writes=tensor._version,
        address=torch_writes.address(tensor),
        shape=tensor.shape,
        strides=tensor.stride(),
        dtype=tensor.dtype,
        known=known,
        watched=watched,
    )
    _entries[key] = entry


def recall(tensor: object) -> Known | None:
    """Return what is known of a tensor as it is now."""
    entry = _entries.get(id(tensor))
    return entry.known if entry is not None and isinstance(tensor, torch.Tensor) and entry.is_of(tensor) else None


def are_any() -> bool:
    """Return True if some tensor may be known."""
    return bool(_entries)


def wrap(
    compiled: Callable[..., Any], known: Sequence[tuple[int, Known]], read: Sequence[int] = ()
) -> Callable[..., Any]:
    """Wrap a graph's compiled function to remember what is known of its outputs, and keep what was known of its inputs. known: of outputs,
    by their places. read: the places of inputs that may be known and that the graph does not write to."""
    if not known and not read:
        return compiled

    def call(*args: Any) -> Any:
        outs = _while_read(compiled, args, read) if read and _entries else compiled(*args)
        for place, meaning in known:
            # PyTorch's shape inference runs on other tensors than the model's.
            if type(outs[place]) is torch.Tensor:
                remember(outs[place], meaning)
        return outs

    return call


def _while_read(compiled: Callable[..., Any], args: Sequence[Any], read: Sequence[int]) -> Any:
    """Call code that reads inputs at these places, now and in its backward."""
    found = [_entries.get(id(args[place])) for place in read]
    entries = [entry for entry in found if entry is not None and entry.watched]
    if not entries:
        return compiled(*args)
    _begin_to_read(entries)
    try:
        outs = compiled(*args)
    finally:
        _end_to_read(entries)
    if torch.is_grad_enabled():
        _watch_after_backward(outs, entries)
    return outs


def _watch_after_backward(outs: object, entries: Sequence[_Entry]) -> None:
    """Watch again after the backward: a checkpoint runs the forward again within it, and looks up what is known."""
    held: list[_Entry] = []

    def before() -> None:
        held[:] = [entry for entry in entries if (tensor := entry.tensor()) is not None and entry.is_of(tensor)]

    def after() -> None:
        for entry in held:
            tensor = entry.tensor()
            if tensor is not None and entry.readers == 0 and not torch_writes.is_unwritten(tensor):
                torch_writes.watch_again(tensor)
        held.clear()

    torch_writes.around_backward(outs, before, after)


_reading = threading.Lock()


def _begin_to_read(entries: Iterable[_Entry]) -> None:
    with _reading:
        for entry in entries:
            tensor = entry.tensor()
            if entry.readers == 0:
                entry.holds = tensor is not None and entry.is_of(tensor)
            entry.readers += 1
            if entry.holds and tensor is not None:
                torch_writes.unwatch(tensor)


def _end_to_read(entries: Iterable[_Entry]) -> None:
    with _reading:
        for entry in entries:
            tensor = entry.tensor()
            entry.readers -= 1
            if entry.readers == 0 and entry.holds and tensor is not None:
                torch_writes.watch_again(tensor)


def _forget(key: int, dead: weakref.ref[torch.Tensor]) -> None:
    entry = _entries.get(key)
    if entry is not None and entry.tensor is dead:
        del _entries[key]
