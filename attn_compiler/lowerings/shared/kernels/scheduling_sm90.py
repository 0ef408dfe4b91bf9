"""Scheduling of persistent kernels in Gluon: the next block of queries, and barriers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn_compiler.lowerings.shared.kernels.tuples_sm90 import Barriers


@gluon.jit
def place(i, section, blocks, heads_of_all):
    """Return for the i-th block of all: its number within its head, and its head among those of all batch rows.

    `section` heads take turns block by block before the next ones do, so that their tensors fit the L2 cache. Under a causal mask a
    block's length grows with its number. Blocks go up and down through the sections, last down.
    """
    of_section, within = i // (section * blocks), i % (section * blocks)
    together = gl.maximum(gl.minimum(section, heads_of_all - of_section * section), 1)
    block = within // together
    is_down = ((heads_of_all - 1) // section - of_section) % 2 == 0
    block = gl.where(is_down, blocks - 1 - block, block)
    return block, of_section * section + within % together


@gluon.jit
def turn(nth, section, blocks, heads_of_all):
    """Return whether there is an nth block of queries for this program, and its `place`. Every other round of programs takes blocks in
    reverse order, so that all programs have about equal work, and short ones last."""
    programs, own = gl.num_programs(0), gl.program_id(0)
    i = nth * programs + own + (nth % 2) * (programs - 1 - 2 * own)
    block, row = place(i, section, blocks, heads_of_all)
    return i < blocks * heads_of_all, block, row


@gluon.jit
def barriers_of(QUERIES: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Make `Barriers` for QUERIES tiles of queries, each of one warpgroup, and STAGES tiles of keys and values, read by all CONSUMERS."""
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    return Barriers(q_full=q_full, q_empty=q_empty, k_full=k_full, k_empty=k_empty, v_full=v_full, v_empty=v_empty)
