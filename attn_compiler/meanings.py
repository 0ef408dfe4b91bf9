"""What is known of tensors that compiled code gave back: a mask that one graph makes keeps its meaning in another one.

A tensor is known as long as it is the very object that was given back, lies in memory as it did, and nobody could write to that memory,
by whatever way (torch_writes.py). What can't be watched is not known. A view or a copy is another object, and nothing is known of it.

Compiled code takes the address of what it reads, as one who writes would. So a graph's code watches the tensors again that were
known before it ran, and that its graph does not write to; its backward does, too.

Looking up waits for no device. An entry goes with its tensor. Threads: each entry is set and taken out by one operation on a dictionary,
and says itself which tensor it is of.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attn_compiler import index_expr as ix
from attn_compiler import torch_writes
from attn_compiler.index_expr import Expr, Index, Load, Size

#: stands for the known tensor in loads of its own elements
ITSELF = "itself"


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the elements of a tensor are.

    element: over `indices(dims)`. It loads other elements of the tensor itself. Its sizes are those of the tensor's axes.
    dims: how many axes the tensor has.
    """

    element: Expr
    dims: int

    @property
    def words(self) -> str:
        return ix.text(self.element)


class _Entry(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    writes: int
    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    known: Known

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the one that is known, as it was."""
        return (
            self.tensor() is tensor
            and torch_writes.is_unwritten(tensor)
            and self.writes == tensor._version
            and self.address == torch_writes.address(tensor)
            and self.strides == tensor.stride()
            and self.shape == tensor.shape
            and self.dtype == tensor.dtype
        )


def indices(dims: int) -> tuple[Index, ...]:
    """The indices that a known element is over."""
    return tuple(Index(f"i{axis}") for axis in range(dims))


def size_of_axis(axis: int) -> Size:
    return Size(f"n{axis}")


def own_element(at: tuple[Expr, ...], kind: str) -> Expr:
    """An element of the known tensor itself."""
    return Load(ITSELF, at, kind)


_entries: dict[int, _Entry] = {}


def remember(tensor: torch.Tensor, known: Known) -> None:
    """Keep what is known of a tensor for as long as the tensor lives and is not written to."""
    if tensor.is_inference() or not torch_writes.watch(tensor):
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
    )
    _entries[key] = entry


def of(tensor: object) -> Known | None:
    """What is known of a tensor as it is now."""
    entry = _entry_of(tensor)
    return None if entry is None else entry.known


def _entry_of(tensor: object) -> _Entry | None:
    entry = _entries.get(id(tensor))
    return entry if entry is not None and isinstance(tensor, torch.Tensor) and entry.is_of(tensor) else None


def are_any() -> bool:
    """Whether there is a tensor of which something may be known."""
    return bool(_entries)


def telling(
    compiled: Callable[..., Any], known: Sequence[tuple[int, Known]], read: Sequence[int] = ()
) -> Callable[..., Any]:
    """A graph's compiled function, which remembers what is known of its outputs, and what was known of its inputs.

    known: of outputs, by their places. read: the places of inputs that may be known and that the graph does not write to.
    """
    if not known and not read:
        return compiled

    def call(*args: Any) -> Any:
        given = [found for place in read if (found := _entry_of(args[place])) is not None] if _entries else []
        outs = compiled(*args)
        if given:
            _watch_again(given)
            if torch.is_grad_enabled():
                _watch_after_backward(outs, given)
        for place, meaning in known:
            # What PyTorch learns shapes with is no tensor of the model's.
            if type(outs[place]) is torch.Tensor:
                remember(outs[place], meaning)
        return outs

    return call


def _watch_again(entries: Iterable[_Entry]) -> None:
    """To be called when nobody but readers had the memory since the entries held."""
    for entry in entries:
        tensor = entry.tensor()
        if tensor is not None and not torch_writes.is_unwritten(tensor):
            torch_writes.watch(tensor)


def _watch_after_backward(outs: object, entries: Sequence[_Entry]) -> None:
    held: list[_Entry] = []

    def before() -> None:
        held[:] = [entry for entry in entries if (tensor := entry.tensor()) is not None and entry.is_of(tensor)]

    def after() -> None:
        _watch_again(held)
        held.clear()

    torch_writes.around_backward(outs, before, after)


def _forget(key: int, dead: weakref.ref[torch.Tensor]) -> None:
    entry = _entries.get(key)
    if entry is not None and entry.tensor is dead:
        del _entries[key]
