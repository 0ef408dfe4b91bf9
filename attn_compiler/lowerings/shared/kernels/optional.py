"""Operands that a plan may be without: None, which Triton knows when it compiles, stays None.

One value each, and both branches: Triton returns no tuple that holds None, and follows a bare return where the other one is in an else.
"""

# ruff: noqa: RET502, RET505

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at_index(pointer, index, stride):
    """Where a batch row begins, or a head."""
    if pointer is None:
        return
    else:
        return pointer + index.to(tl.int64) * stride


@triton.jit
def of_head(pointer, batch, head, stride_b, stride_h):
    """Where a head of a batch row begins."""
    if pointer is None:
        return
    else:
        return pointer + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def list_of(Tiles, batch, head, block, lists):
    """Where a block's list of tiles begins (kernel_plan.Plan). lists: `ListStrides`."""
    if Tiles is None:
        return
    else:
        first = Tiles + batch.to(tl.int64) * lists.tiles_b + head.to(tl.int64) * lists.tiles_h
        return first + block.to(tl.int64) * lists.tiles_row


@triton.jit
def load_one(pointer, index):
    """The number at an index, as a scalar."""
    if pointer is None:
        return
    else:
        return tl.load(pointer + index)


@triton.jit
def turned(x):
    """A column as a row, or a row as a column."""
    if x is None:
        return
    else:
        return tl.trans(x)


@triton.jit
def load_column(pointer, offsets, inside):
    """(M, 1), 0 where `inside` (M,) does not hold."""
    if pointer is None:
        return
    else:
        return tl.load(pointer + offsets, mask=inside, other=0)[:, None]


@triton.jit
def load_upper(Rows, rows_side, offsets, inside):
    """The keys after the last one of each query, (M, 1): the second side of `Rows`."""
    if Rows is None:
        return
    else:
        return tl.load(Rows + rows_side + offsets, mask=inside, other=0)[:, None]


@triton.jit
def load_keys(Keys, keys, inside):
    """Which keys may be used, in the shape of `keys`."""
    if Keys is None:
        return
    else:
        return tl.load(Keys + keys, mask=inside, other=0) != 0


@triton.jit
def load_row(pointer, positions, inside):
    """In the shape of `positions`, 0 where `inside` does not hold."""
    if pointer is None:
        return
    else:
        return tl.load(pointer + positions, mask=inside, other=0)
