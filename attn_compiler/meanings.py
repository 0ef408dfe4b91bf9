"""What is known of tensors that compiled code gave back: a mask that one graph makes keeps its meaning in another one.

A tensor is known as long as it is the very object that was given back and nobody wrote to it: PyTorch counts the writes to a tensor and
to all views of it. A view or a copy is another object, and nothing is known of it. PyTorch does not count the writes to tensors of
inference mode, so nothing is known of those. PyTorch does not count a write through `.data` or from outside of PyTorch. Autograd's own
check of what it saved does not see such a write either.

Looking up costs about half a microsecond and waits for no device. An entry goes with its tensor. Threads: each entry is set and taken out
by one operation on a dictionary, and says itself which tensor it is of.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attn_compiler import index_expr as ix
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
    known: Known


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
    if tensor.is_inference():
        return
    key = id(tensor)
    entry = _Entry(
        tensor=weakref.ref(tensor, functools.partial(_forget, key)),
        writes=tensor._version,
        address=tensor.data_ptr(),
        shape=tensor.shape,
        known=known,
    )
    _entries[key] = entry


def of(tensor: object) -> Known | None:
    """What is known of a tensor as it is now."""
    entry = _entries.get(id(tensor))
    if entry is None or not isinstance(tensor, torch.Tensor) or entry.tensor() is not tensor:
        return None
    is_same = entry.writes == tensor._version and entry.address == tensor.data_ptr() and entry.shape == tensor.shape
    return entry.known if is_same else None


def are_any() -> bool:
    """Whether there is a tensor of which something may be known."""
    return bool(_entries)


def telling(compiled: Callable[..., Any], known: Sequence[tuple[int, Known]]) -> Callable[..., Any]:
    """A graph's compiled function, which remembers what is known of its outputs. known: by their places."""
    if not known:
        return compiled

    def call(*args: Any) -> Any:
        outs = compiled(*args)
        for place, meaning in known:
            # What PyTorch learns shapes with is no tensor of the model's.
            if type(outs[place]) is torch.Tensor:
                remember(outs[place], meaning)
        return outs

    return call


def _forget(key: int, dead: weakref.ref[torch.Tensor]) -> None:
    entry = _entries.get(key)
    if entry is not None and entry.tensor is dead:
        del _entries[key]
