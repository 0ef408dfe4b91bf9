"""Transfer of score tiles between memory and the tensor cores' results without shared memory.

A thread holds single pairs of neighbours of a product's result, and memory is read and written in vectors of 16 bytes. So such a
kernel takes its rows (keys) and columns (queries) in another order, in which a thread's elements are neighbours in memory. Only the
order of loads and stores of whole rows changes by that.

The order is that of PTX ISA, wgmma, "Matrix Fragments for D". A result has (N, M) elements, with N = (W, 2, 8) and M = (J, 4, 4, 2). A warp
has one W and the four next W, a lane one of the 8 rows and one of the latter 4 columns, and everything else is in its registers. In memory
these keys are (W, 8, 2) and these queries (J, 4', 4, 2), where 4' is the lane's. Elsewhere than on Hopper a product's result may be spread
differently: then this order is correct too, but not faster than any other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels.tile_parts import load_by_distance


@triton.jit
def key_order(SIZE: tl.constexpr):
    """Return (SIZE,) int32: which of a block's keys each row of the scores is; SIZE is a multiple of 16."""
    row = tl.arange(0, SIZE)
    return row // 16 * 16 + row % 8 * 2 + row % 16 // 8


@triton.jit
def query_order(SIZE: tl.constexpr):
    """Return (SIZE,) int32: which of a block's queries each column of the scores is; SIZE is a multiple of 32."""
    column = tl.arange(0, SIZE)
    return column // 32 * 32 + column % 8 // 2 * 8 + column % 32 // 8 * 2 + column % 2


@triton.jit
def in_query_order(values, SIZE: tl.constexpr):
    """Reorder (SIZE,) numbers of a block's queries as the columns of the scores."""
    return tl.reshape(tl.permute(tl.reshape(values, (SIZE // 32, 4, 4, 2)), (0, 2, 1, 3)), (SIZE,))


@triton.jit
def store_fragments(base, tile, start_q, start_k, stride_k, sizes, N: tl.constexpr, M: tl.constexpr):
    """Write scores (N, M) to memory where queries are neighbours and keys are stride_k, a multiple of 16 elements, apart."""
    parts = tl.reshape(tile, (N // 16, 2, 8, M // 32, 4, 4, 2))
    # With two axes there is one way to spread them over threads: 4 lanes along the latter, 8 and all warps along the former.
    parts = tl.reshape(tl.permute(parts, (3, 1, 0, 2, 5, 4, 6)), (N * M // 32, 32))
    part = tl.arange(0, N * M // 32)[:, None]
    keys = start_k + part % (N // 2) * 2 + part // (N // 2) % 2
    queries = start_q + part // N * 32 + tl.arange(0, 32)[None, :]
    inside = (queries < sizes.seqlen_q) & (keys < sizes.seqlen_kv)
    pointers = base + keys.to(tl.int64) * tl.multiple_of(stride_k, 16) + queries
    tl.store(pointers, parts.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _local_pairs(N: tl.constexpr, M: tl.constexpr):
    """Return queries and keys of a block, counted from its first, in the shape in which memory is read: (part, 16 keys)."""
    part = tl.arange(0, N * M // 16)[:, None]
    rest = part // (N // 4)
    queries = rest // 8 * 32 + rest % 8 + part % 4 * 8
    return queries, part // 4 % (N // 16) * 16 + tl.arange(0, 16)[None, :]


@triton.jit
def _as_scores(parts, N: tl.constexpr, M: tl.constexpr):
    parts = tl.reshape(parts, (M // 32, 4, 2, N // 16, 4, 8, 2))
    return tl.reshape(tl.permute(parts, (3, 6, 5, 0, 1, 4, 2)), (N, M))


@triton.jit
def load_fragments(pairs, start_q, start_k, sizes, N: tl.constexpr, M: tl.constexpr):
    """Load the element of each pair as scores (N, M), 0 beyond the last query and key. pairs: `Pairs`. Vectors where their k is 1."""
    queries, keys = _local_pairs(N, M)
    inside = (queries < sizes.seqlen_q - start_q) & (keys < sizes.seqlen_kv - start_k)
    first = pairs.base + start_q.to(tl.int64) * pairs.q + start_k.to(tl.int64) * pairs.k
    pointers = first + (queries.to(tl.int64) * pairs.q + keys.to(tl.int64) * pairs.k)
    return _as_scores(tl.load(pointers, mask=inside, other=0), N, M)


@triton.jit
def load_distance_fragments(added, start_q, start_k, sizes, N: tl.constexpr, M: tl.constexpr):
    """Load the biases by distance as scores (N, M), 0 beyond the last query and key. added: `Added`."""
    queries, keys = _local_pairs(N, M)
    return _as_scores(load_by_distance(added, start_q + queries, start_k + keys, sizes, True), N, M)
