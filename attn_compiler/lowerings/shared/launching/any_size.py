"""Numbers that Triton is given to compile a kernel that serves calls of every size. Imports neither torch nor triton.

Triton compiles a kernel apart for each number that is 1, and for each that is a multiple of 16. Documents of 24 lengths took 9 kernels that
way. So Triton is given other numbers of the same class, and a call's sizes are of two classes alone: all are multiples of 16, or not. In
the first, kernels read masks and biases by whole vectors. A backward with a learned bias takes 1.6 times as long without that, and 2.2
times with a learned table (H200, 2048 positions).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_compiler.lowerings.shared.kernels.tuples import ListStrides, Strides

#: Triton compiles a variant for multiples of it.
MULTIPLE = 16

#: bound of the numbers that Triton passes in 32 bits, and a small one that stands for all of them
_WIDE, _SMALL = 2**31, 3
_SIZES = ("seqlen_q", "seqlen_kv")


def are_multiples(numbers: Mapping[str, Any]) -> bool:
    """Return whether the lengths that a kernel gets are multiples of 16. False if it gets none."""
    sizes = [numbers[name] for name in _SIZES if name in numbers]
    return bool(sizes) and all(size % MULTIPLE == 0 for size in sizes)


def shown(value: Any, *, multiples: bool) -> Any:
    """Return the number, or tuple of numbers, that Triton is given. multiples: the lengths of the call are multiples of 16.

    Strides of tensors with a head dim are multiples of that, whatever the lengths are. If one of them is no multiple of 16, the others may
    be multiples only by the lengths, so none is given as one. Strides of lists are numbers of blocks, which may be anything.
    """
    if isinstance(value, Strides):
        multiples = all(stride % MULTIPLE == 0 for stride in value)
    if isinstance(value, ListStrides):
        multiples = False
    if isinstance(value, tuple):
        members = [shown(member, multiples=multiples) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    return _like(value, multiples and value % MULTIPLE == 0) if type(value) is int else value


def _like(value: int, is_multiple: bool) -> int:
    """Return a number of the same width, a multiple of 16 or not. 1 stays."""
    if value == 1:
        return value
    small = MULTIPLE if is_multiple else _SMALL
    return small if -_WIDE <= value < _WIDE else small + 2 * _WIDE
