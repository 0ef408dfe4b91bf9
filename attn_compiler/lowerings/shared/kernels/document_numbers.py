"""The kernel that numbers documents in 32 bits (shared/ops/documents.py)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fits(X, seqlen, BLOCK: tl.constexpr):
    """Return whether all numbers of a row fit into 32 bits."""
    least, most = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, seqlen, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(X + at, mask=at < seqlen, other=0)
        least, most = tl.minimum(least, found), tl.maximum(most, found)
    return (tl.min(least, 0) >= -(2**31)) & (tl.max(most, 0) < 2**31)


@triton.jit
def _first_keys(own, Keys, seqlen_kv, BLOCK: tl.constexpr):
    """Return the index of the first key of each of `own`'s numbers, or -1."""
    first = tl.zeros([BLOCK], tl.int32) + 2**30
    for key in range(seqlen_kv):
        first = tl.minimum(first, tl.where(own == tl.load(Keys + key), key, 2**30))
    return tl.where(first == 2**30, -1, first)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_kv", "queries_b", "keys_b"])
def document_numbers(
    Queries, Keys, NumbersQ, NumbersK, seqlen_q, seqlen_kv, queries_b, keys_b, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Queries, Keys: int64 (batch, Sq), (batch, Skv), packed rows. NumbersQ, NumbersK: int32, packed. Keys, NumbersK: None where they are
    those of the queries.

    Grid: (blocks of BLOCK queries and of as many keys, batch). A program reads both whole rows in steps of CHUNK, and numbers one block.
    """
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    Queries += batch * queries_b
    fits = _fits(Queries, seqlen_q, CHUNK)
    if Keys is not None:
        Keys += batch * keys_b
        fits = fits & _fits(Keys, seqlen_kv, CHUNK)
    blocks_q = tl.cdiv(seqlen_q, BLOCK)
    if block < blocks_q:
        at = block * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(Queries + at, mask=at < seqlen_q, other=0)
        numbers = own.to(tl.int32)
        if fits == 0:
            if Keys is not None:
                numbers = _first_keys(own, Keys, seqlen_kv, BLOCK)
            else:
                numbers = _first_keys(own, Queries, seqlen_q, BLOCK)
        tl.store(NumbersQ + batch * seqlen_q + at, numbers, mask=at < seqlen_q)
    elif Keys is not None:
        at = (block - blocks_q) * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(Keys + at, mask=at < seqlen_kv, other=0)
        numbers = own.to(tl.int32)
        if fits == 0:
            numbers = _first_keys(own, Keys, seqlen_kv, BLOCK)
        tl.store(NumbersK + batch * seqlen_kv + at, numbers, mask=at < seqlen_kv)
