"""Nodes that turn a site's mask or bias into what a kernel of PyTorch's reads, as SDPA's composite does."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter

# The memory-efficient kernel loads the bias in vectors of 8: every stride but the last is a multiple of it.
_EFFICIENT_ALIGNMENT = 8

Size = int | fx.Node


def additive(emitter: Emitter, mask: fx.Node, dtype: torch.dtype, *, keep: Collection[torch.dtype] = ()) -> fx.Node:
    """`mask` as a 4-D tensor that is added to the scaled scores, of `dtype` or as it is if its dtype is in `keep`."""
    if emitter.value(mask).dtype not in (dtype, *keep):
        mask = emitter.shared_mask(mask, dtype)
    for _ in range(4 - emitter.value(mask).dim()):
        mask = emitter.call(torch.ops.aten.unsqueeze.default, mask, 0)
    return mask


def with_adjacent_keys(emitter: Emitter, bias: fx.Node, k: fx.Node) -> fx.Node:
    """`bias` (b, h, q, 1 or Skv) with all Skv keys, one after the other in memory; copied only if they aren't already."""
    expanded = _with_all_keys(emitter, bias, k)
    if _is_one(emitter.value(expanded).stride(-1)):
        return expanded
    return emitter.call(torch.ops.aten.clone.default, expanded, memory_format=torch.contiguous_format)


def for_efficient(emitter: Emitter, bias: fx.Node, q: fx.Node, k: fx.Node) -> fx.Node:
    """`bias` expanded to (B, Hq, Sq, Skv), its rows aligned: copied into longer rows where they aren't, or may not be."""
    bias = _with_all_keys(emitter, bias, k)
    if not _is_aligned(emitter.value(bias)):
        unaligned = bias
        bias = emitter.once(("aligned rows", unaligned), lambda: _with_aligned_rows(emitter, unaligned))
    # An axis that has its size keeps it: naming it again would tie two symbols together.
    shape = emitter.value(bias).shape
    sizes = [_size(emitter, q, axis) if _is_one(shape[axis]) else -1 for axis in range(3)]
    return emitter.call(torch.ops.aten.expand.default, bias, [*sizes, -1])


def _with_aligned_rows(emitter: Emitter, bias: fx.Node) -> fx.Node:
    """A copy whose rows lie a multiple of the alignment apart. Not by padding: that op takes no symbolic size, and a symbolic
    number of columns that may be 1 is guarded on."""
    *rows, keys = (_size(emitter, bias, axis) for axis in range(4))
    zeros = emitter.call(torch.ops.aten.new_zeros.default, bias, [*rows, _aligned(emitter, keys)])
    filled = emitter.call(torch.ops.aten.slice_scatter.default, zeros, bias, 3, 0, keys)
    return emitter.call(torch.ops.aten.slice.Tensor, filled, 3, 0, keys)


def _with_all_keys(emitter: Emitter, bias: fx.Node, k: fx.Node) -> fx.Node:
    keys = _size(emitter, k, 2)
    if not _is_one(emitter.value(bias).shape[3]) or keys == 1:
        return bias
    return emitter.call(torch.ops.aten.expand.default, bias, [-1, -1, -1, keys])


def _is_aligned(value: torch.Tensor) -> bool:
    """A symbolic stride counts as unaligned: asking it would add a guard."""
    *others, last = value.stride()
    return _is_one(last) and all(isinstance(s, int) and s % _EFFICIENT_ALIGNMENT == 0 for s in others)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def _aligned(emitter: Emitter, size: Size) -> Size:
    """The first multiple of the alignment above `size`."""
    if isinstance(size, int):
        return (size // _EFFICIENT_ALIGNMENT + 1) * _EFFICIENT_ALIGNMENT
    blocks = emitter.call(operator.floordiv, size, _EFFICIENT_ALIGNMENT)
    return emitter.call(operator.mul, emitter.call(operator.add, blocks, 1), _EFFICIENT_ALIGNMENT)


def _size(emitter: Emitter, node: fx.Node, axis: int) -> Size:
    size = emitter.value(node).shape[axis]
    return size if isinstance(size, int) else emitter.call(torch.ops.aten.sym_size.int, node, axis)
