"""Optional operands: None, which Triton knows at compile time, stays None.

Each function returns one value, and has both branches: Triton returns no tuple that holds None, and takes a bare return only with an else.
"""

# ruff: noqa: RET502, RET505

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at_index(pointer, index, stride):
    """Return the address of a batch row, or a head."""
    if pointer is None:
        return
    else:
        return pointer + index.to(tl.int64) * stride


@triton.jit
def of_head(pointer, batch, head, stride_b, stride_h):
    """Return the address of a head of a batch row."""
    if pointer is None:
        return
    else:
        return pointer + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def list_of(Tiles, batch, head, block, lists):
    """Return the address of a block's list of tiles (kernel_plan.Plan). lists: `ListStrides`."""
    if Tiles is None:
        return
    else:
        first = Tiles + batch.to(tl.int64) * lists.tiles_b + head.to(tl.int64) * lists.tiles_h
        return first + block.to(tl.int64) * lists.tiles_row


@triton.jit
def load_one(pointer, index):
    """Load the number at an index, as a scalar."""
    if pointer is None:
        return
    else:
        return tl.load(pointer + index)


@triton.jit
def turned(x):
    """Turn a column into a row, or a row into a column."""
    if x is None:
        return
    else:
        return tl.trans(x)


@triton.jit
def load_column(pointer, offsets, inside):
    """Load (M, 1), 0 where `inside` (M,) does not hold."""
    if pointer is None:
        return
    else:
        return tl.load(pointer + offsets, mask=inside, other=0)[:, None]


@triton.jit
def load_upper(Rows, rows_side, offsets, inside):
    """Load the end of each query's interval of keys, (M, 1): the second side of `Rows`."""
    if Rows is None:
        return
    else:
        return tl.load(Rows + rows_side + offsets, mask=inside, other=0)[:, None]


@triton.jit
def load_keys(Keys, keys, inside):
    """Load which keys may be used, in the shape of `keys`."""
    if Keys is None:
        return
    else:
        return tl.load(Keys + keys, mask=inside, other=0) != 0


@triton.jit
def load_row(pointer, positions, inside):
    """Load numbers in the shape of `positions`, 0 where `inside` does not hold."""
    if pointer is None:
        return
    else:
        return tl.load(pointer + positions, mask=inside, other=0)
