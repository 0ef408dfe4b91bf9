"""Nodes that convert a site's mask or bias to the form that PyTorch's kernels read, as SDPA's composite does."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

import torch
from torch import fx

from attn_compiler.index_expr.on_nodes import size_of
from attn_compiler.lowerings.base import Emitter

# The memory-efficient kernel loads the bias in vectors of 8: every stride but the last is a multiple of it.
_EFFICIENT_ALIGNMENT = 8
# Triton checks whether a stride is a multiple of 16, and of no other number. One or two tiles of keys are loaded one by one faster than
# copied: windows of 49 tokens took 178 us, and 210 by a copy (learned_bias_h200.csv).
_TRITON_ALIGNMENT, _TRITON_LEAST = 16, 128

Size = int | fx.Node


def additive(emitter: Emitter, mask: fx.Node, dtype: torch.dtype, *, keep: Collection[torch.dtype] = ()) -> fx.Node:
    """Return `mask` as a 4-D tensor that is added to the scaled scores, of `dtype` or unchanged if its dtype is in `keep`."""
    if emitter.value(mask).dtype not in (dtype, *keep):
        mask = emitter.shared_mask(mask, dtype)
    for _ in range(4 - emitter.value(mask).dim()):
        mask = emitter.call(torch.ops.aten.unsqueeze.default, mask, 0)
    return mask


def with_adjacent_keys(emitter: Emitter, bias: fx.Node, k: fx.Node) -> fx.Node:
    """Return `bias` (b, h, q, 1 or Skv) with all Skv keys adjacent in memory; copied only if they aren't already."""
    expanded = _with_all_keys(emitter, bias, k)
    if _is_one(emitter.value(expanded).stride(-1)):
        return expanded
    return emitter.call(torch.ops.aten.clone.default, expanded, memory_format=torch.contiguous_format)


def for_efficient(emitter: Emitter, bias: fx.Node, q: fx.Node, k: fx.Node) -> fx.Node:
    """Expand `bias` to (B, Hq, Sq, Skv) with aligned rows: copied into longer rows where they aren't, or may not be."""
    bias = _with_all_keys(emitter, bias, k)
    if not _is_aligned(emitter.value(bias), _EFFICIENT_ALIGNMENT):
        unaligned = bias
        bias = emitter.once(
            ("aligned rows", unaligned), lambda: _with_aligned_rows(emitter, unaligned, _EFFICIENT_ALIGNMENT)
        )
    # An axis that has its size keeps it: naming the size again would equate two symbols.
    shape = emitter.value(bias).shape
    sizes = [size_of(emitter, q, axis) if _is_one(shape[axis]) else -1 for axis in range(3)]
    return emitter.call(torch.ops.aten.expand.default, bias, [*sizes, -1])


def in_vectors(emitter: Emitter, bias: fx.Node, q: fx.Node) -> fx.Node:
    """Return `bias` (b, h, Sq, Skv), or a copy in longer rows, from which Triton's kernels load vectors. The copy is made once a graph.

    A forward of 577 keys takes 817 us on an H200 where it loads numbers one by one, and 265 us with a copy (learned_bias_h200.csv). A
    bias that is read once is not copied.
    """
    value, of_q = emitter.value(bias), emitter.value(q)
    if not all(isinstance(x, int) for x in (*value.shape, *value.stride())) or min(value.shape[2:]) == 1:
        return bias
    shared = [axis for axis in (0, 1) if value.shape[axis] == 1 or value.stride(axis) == 0]
    is_read_again = any(not _is_one(of_q.shape[axis]) for axis in shared)
    if value.shape[3] < _TRITON_LEAST or not is_read_again or _is_aligned(value, _TRITON_ALIGNMENT):
        return bias
    rows = _aligned(emitter, value.shape[3], _TRITON_ALIGNMENT)
    emitter.note(f"bias copied into rows of {rows} numbers, which are loaded in vectors; once a graph")
    return emitter.once(
        ("vectors", bias), lambda: _with_aligned_rows(emitter, _once_each(emitter, bias, shared), _TRITON_ALIGNMENT)
    )


def _once_each(emitter: Emitter, bias: fx.Node, shared: Iterable[int]) -> fx.Node:
    """Return `bias` with one entry along axes of which all entries are the same memory."""
    for axis in shared:
        if not _is_one(emitter.value(bias).shape[axis]):
            bias = emitter.call(torch.ops.aten.slice.Tensor, bias, axis, 0, 1)
    return bias


def _with_aligned_rows(emitter: Emitter, bias: fx.Node, alignment: int) -> fx.Node:
    """Return a copy whose rows are a multiple of the alignment apart. It is not made by padding: that op takes no symbolic size, and a
    symbolic number of columns that may be 1 is guarded on."""
    *rows, keys = (size_of(emitter, bias, axis) for axis in range(4))
    zeros = emitter.call(torch.ops.aten.new_zeros.default, bias, [*rows, _aligned(emitter, keys, alignment)])
    filled = emitter.call(torch.ops.aten.slice_scatter.default, zeros, bias, 3, 0, keys)
    return emitter.call(torch.ops.aten.slice.Tensor, filled, 3, 0, keys)


def _with_all_keys(emitter: Emitter, bias: fx.Node, k: fx.Node) -> fx.Node:
    keys = size_of(emitter, k, 2)
    if not _is_one(emitter.value(bias).shape[3]) or keys == 1:
        return bias
    return emitter.call(torch.ops.aten.expand.default, bias, [-1, -1, -1, keys])


def _is_aligned(value: torch.Tensor, alignment: int) -> bool:
    """Return whether strides are aligned. A symbolic stride counts as unaligned: asking it would add a guard."""
    *others, last = value.stride()
    return _is_one(last) and all(isinstance(s, int) and s % alignment == 0 for s in others)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def _aligned(emitter: Emitter, size: Size, alignment: int) -> Size:
    """Return the first multiple of the alignment above `size`."""
    if isinstance(size, int):
        return (size // alignment + 1) * alignment
    blocks = emitter.call(operator.floordiv, size, alignment)
    return emitter.call(operator.mul, emitter.call(operator.add, blocks, 1), alignment)
