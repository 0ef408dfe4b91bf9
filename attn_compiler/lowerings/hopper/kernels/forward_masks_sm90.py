"""Masks of a tile of Hopper's forward, in Gluon. Absent operands are None; optional.py says how it is returned."""

# ruff: noqa: RET502, RET505

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_compiler.lowerings.shared.kernels.optional import at_index
from attn_compiler.lowerings.shared.kernels.tile_parts import LOG2E
from attn_compiler.lowerings.shared.kernels.tiles_sm90 import ROWS, bits_set, bytes_set, up_to


@gluon.jit
def masked(qk, tile, own, masks, seqlen_kv, QK_LAYOUT: gl.constexpr, how: gl.constexpr):
    """Return the scores of a tile, -inf where a pair is not allowed."""
    start = tile * how.BLOCK_N
    qk = gl.where(up_to(own.most - start, QK_LAYOUT, how.BLOCK_N), qk, float("-inf"))
    if how.HAS_LEFT or masks.Rows is not None:
        qk = gl.where(up_to(own.least - 1 - start, QK_LAYOUT, how.BLOCK_N), float("-inf"), qk)
    if masks.Keys is not None:
        qk = gl.where(bytes_set(masks.Keys, start, seqlen_kv, QK_LAYOUT, how.BLOCK_N), qk, float("-inf"))
    if own.document is not None:
        keys = start + gl.arange(0, how.BLOCK_N, layout=gl.SliceLayout(0, QK_LAYOUT))
        document = gl.load(masks.DocumentsK + keys, mask=keys < seqlen_kv, other=0)
        qk = gl.where(own.document[:, None] == document[None, :], qk, float("-inf"))
    if masks.Bits is not None:
        words = tile * (how.BLOCK_N // 32)
        qk = gl.where(bits_set(masks.Bits, own.bits, words, QK_LAYOUT, how.BLOCK_N), qk, float("-inf"))
    return qk


@gluon.jit
def keys_of(consumer: gl.constexpr, block, batch, masks, masking, sizes, QK_LAYOUT: gl.constexpr, how: gl.constexpr):
    """Return the numbers of a warpgroup's queries of a block, and the first and the last key that each may use."""
    rows = block * how.BLOCK_M + consumer * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QK_LAYOUT))
    inside = rows < sizes.seqlen_q
    most = rows * 0 + (sizes.seqlen_kv - 1)
    least = rows * 0
    if how.HAS_RIGHT:
        most = gl.minimum(most, rows + sizes.band_right)
    if how.HAS_LEFT:
        least = rows - sizes.band_left
    Rows = at_index(masks.Rows, batch, masking.rows_b)
    if Rows is not None:
        least = gl.maximum(least, gl.load(Rows + rows, mask=inside, other=0))
        most = gl.minimum(most, gl.load(Rows + masking.rows_side + rows, mask=inside, other=0) - 1)
    return rows, least, most


@gluon.jit
def documents_of(rows, masks, masking, batch, seqlen_q):
    """Return the documents of queries, or None."""
    if masks.DocumentsQ is None:
        return
    else:
        of_row = at_index(masks.DocumentsQ, batch, masking.documents_qb)
        return gl.load(of_row + rows, mask=rows < seqlen_q, other=0)


@gluon.jit
def slope_of(masks, head):
    """Return the slope of a head in units of log 2, or None."""
    if masks.Slopes is None:
        return
    else:
        return gl.load(masks.Slopes + head) * LOG2E


@gluon.jit
def words_of(rows, masks, masking, seqlen_q):
    """Return the addresses of the queries' words of a dense mask, or None."""
    if masks.Bits is None:
        return
    else:
        return gl.minimum(rows, seqlen_q - 1) * masking.mask_q
