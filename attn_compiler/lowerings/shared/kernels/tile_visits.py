"""The tiles that a block of queries or of keys visits: by its band, or by its list. For Triton kernels, and for those in Gluon."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_in_band(
    first_query, last_query, band_left, band_right, seqlen_kv,
    BLOCK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Return the blocks of keys that a block of queries uses, and those among them that it uses in full, both as first and end."""
    start, all_from = 0, 0
    end, all_until = seqlen_kv, seqlen_kv
    if HAS_LEFT:
        start = tl.maximum(first_query - band_left, 0)
        all_from = tl.maximum(last_query - band_left, 0)
    if HAS_RIGHT:
        end = tl.maximum(tl.minimum(last_query + band_right + 1, seqlen_kv), 0)
        all_until = tl.maximum(tl.minimum(first_query + band_right + 1, seqlen_kv), 0)
    first, last = start // BLOCK, tl.cdiv(end, BLOCK)
    if HAS_LEFT:
        last = tl.where(start < end, last, first)
    # For the compiler: unless it knows that no loop count is negative, every product waits for the one before.
    last = tl.maximum(first, last)
    full_first = tl.minimum(tl.maximum(tl.cdiv(all_from, BLOCK), first), last)
    full_last = tl.maximum(tl.minimum(all_until // BLOCK, last), full_first)
    return first, full_first, full_last, last


@triton.jit
def queries_in_band(
    first_key, last_key, band_left, band_right, seqlen_q,
    BLOCK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Return the blocks of queries that use a block of keys, and those among them that use it in full.

    A block that reaches beyond the last query counts as full: its surplus rows are zeros.
    """
    start, all_from = 0, 0
    end, all_until = seqlen_q, seqlen_q + BLOCK - 1
    if HAS_RIGHT:
        start = tl.maximum(first_key - band_right, 0)
        all_from = tl.maximum(last_key - band_right, 0)
    if HAS_LEFT:
        end = tl.maximum(tl.minimum(last_key + band_left + 1, seqlen_q), 0)
        all_until = tl.where(first_key + band_left + 1 >= seqlen_q, all_until, tl.maximum(first_key + band_left + 1, 0))
    first, last = start // BLOCK, tl.cdiv(end, BLOCK)
    last = tl.maximum(first, last)
    full_first = tl.minimum(tl.maximum(tl.cdiv(all_from, BLOCK), first), last)
    full_last = tl.maximum(tl.minimum(all_until // BLOCK, last), full_first)
    return first, full_first, full_last, last


@triton.jit
def keys_to_visit(List, start, sizes, how: tl.constexpr):
    """Return for a block of queries: how many blocks of keys need the mask, the first and the second of them (see `partial_tile`), and the
    run of blocks that don't need it, as first and end."""
    if List is not None:
        partial, first, second, full_first, full_last = load_list(List, sizes.seqlen_kv > how.BLOCK_N)
    else:
        first, full_first, full_last, last = keys_in_band(
            start, tl.minimum(start + how.BLOCK_M, sizes.seqlen_q) - 1, sizes.band_left, sizes.band_right, sizes.seqlen_kv,
            how.BLOCK_N, how.HAS_LEFT, how.HAS_RIGHT,
        )  # fmt: skip
        if how.MASK_ALL:
            full_first, full_last = last, last
        partial = (full_first - first) + (last - full_last)
        second = first
    return partial, first, second, full_first, full_last


@triton.jit
def queries_to_visit(List, start, sizes, how: tl.constexpr):
    """Return for a block of keys the same as `keys_to_visit` for one of queries."""
    if List is not None:
        partial, first, second, full_first, full_last = load_list(List, sizes.seqlen_q > how.BLOCK_M)
    else:
        first, full_first, full_last, last = queries_in_band(
            start, tl.minimum(start + how.BLOCK_N, sizes.seqlen_kv) - 1, sizes.band_left, sizes.band_right, sizes.seqlen_q,
            how.BLOCK_M, how.HAS_LEFT, how.HAS_RIGHT,
        )  # fmt: skip
        if how.MASK_ALL:
            full_first, full_last = last, last
        partial = (full_first - first) + (last - full_last)
        second = first
    return partial, first, second, full_first, full_last


@triton.jit
def load_list(List, several):
    """Load a list, for `keys_to_visit`. several: there is more than one block, so room for two.

    The first two are loaded with the rest of the list. Loaded one after the other, each would delay the start of its block.
    """
    first = tl.load(List + 3)
    second = tl.load(List + 4, mask=several, other=0)
    return tl.load(List), first, second, tl.load(List + 1), tl.load(List + 2)


@triton.jit
def partial_tile(List, i, first, second, full_first, full_last):
    """Return the i-th block that is used in part: the list's, else those on both sides of the blocks that are used in full."""
    if List is not None:
        later = tl.load(List + 3 + i, mask=i > 1, other=0)
        tile = tl.where(i == 0, first, tl.where(i == 1, second, later))
    else:
        before = full_first - first
        tile = tl.where(i < before, first + i, full_last + i - before)
    return tile
