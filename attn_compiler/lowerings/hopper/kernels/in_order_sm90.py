"""Turns of key blocks at a tile of dq, in Gluon, so that it is summed in a fixed order: a counter of each tile tells how many blocks have
added their part.

Programs take blocks in the order in which they add. So the first unfinished block waits for none, whichever programs run at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_compiler.lowerings.shared.kernels.optional import list_of


@gluon.jit
def place_in_order(item, work):
    """Return the place as `scheduling_sm90.place`, with each head's blocks in the order of their numbers."""
    of_section, within = item // (work.section * work.blocks), item % (work.section * work.blocks)
    first = of_section * work.section
    together = gl.maximum(gl.minimum(work.section, work.heads_of_all - first), 1)
    return within // together, first + within % together


@gluon.jit
def rank(Ranks, work, batch, head, block, tile, how: gl.constexpr):
    """Return the number of blocks that add to a tile before this one does."""
    if Ranks is None:
        found = block
        if how.HAS_LEFT:
            found = block - gl.maximum(tile * how.BLOCK_M - work.sizes.band_left, 0) // how.BLOCK_N
        return found
    else:  # noqa: RET505, because the compiler follows one branch alone if the other one is in an else
        return gl.load(list_of(Ranks, batch, head, block, work.lists) + tile)


@gluon.jit
def last_first(i, visits, ahead):
    """Return a block's i-th tile of queries, from the last one on, and the number of listed tiles before the next one.

    ahead: listed tiles before this one.
    """
    done = ahead
    if visits.List is None:
        full = visits.full_last - visits.full_first
        partial = visits.partial - 1 - (i - full)
        before = visits.full_first - visits.first
        edge = gl.where(partial < before, visits.first + partial, visits.full_last + partial - before)
        tile = gl.where(i < full, visits.full_last - 1 - i, edge)
    else:
        left = visits.partial - 1 - ahead
        listed = gl.load(visits.List + 3 + left, mask=left >= 0, other=-1)
        full = visits.full_last - 1 - (i - ahead)
        full = gl.where(full >= visits.full_first, full, -1)
        tile = gl.maximum(listed, full)
        done = ahead + gl.where(listed > full, 1, 0)
    return tile, done


@gluon.jit
def await_turn(turn, wanted):
    """Wait until a counter reaches the wanted number of blocks."""
    ASM: gl.constexpr = (
        "{ .reg .pred is_mine; .reg .b32 found; "
        "AGAIN: ld.acquire.gpu.global.b32 found, [$1]; setp.ge.s32 is_mine, found, $2; @!is_mine bra AGAIN; "
        "mov.b32 $0, found; }"
    )
    gl.inline_asm_elementwise(ASM, "=r,l,r", [turn.to(gl.int64), wanted], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def give_turn(turn):
    """Count this block's part as added."""
    gl.atomic_add(turn, 1, sem="release")


@gluon.jit
def sums_have_come():
    """Wait until the copy engine has added this thread's parts to memory. `tma.store_wait` waits only until it has read them."""
    ASM: gl.constexpr = "cp.async.bulk.wait_group 0; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
