"""Named tuples that Hopper's FP8 kernel takes and passes on, as in shared/kernels/tuples.py. Imports no Triton.

Its tensors and numbers are parameters of their own: Triton's launcher makes no descriptor of a tuple's member, and the kernel is compiled
for some of the numbers alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Fp8Switches(NamedTuple):
    """Compile-time switches of the kernel."""

    HEAD_DIM_QK: Any
    HEAD_DIM_V: Any
    STAGES: Any  # tiles of keys and values that are in shared memory
    SCALE_BLOCK: Any  # positions that share a scale, 0 if all of a head do
    HAS_LEFT: Any
    HAS_RIGHT: Any
    SOFTCAP: Any
    CONSUMERS: Any  # warpgroups that compute, 3 or 4
    REGISTERS: Any  # of a thread that does


class Fp8Work(NamedTuple):
    """Work of all programs."""

    section: Any  # heads that take turns, see `_block`
    blocks: Any  # of queries of a head
    heads_of_all: Any  # B · Hq
    heads_q: Any
    group: Any
    seqlen_q: Any
    seqlen_kv: Any
    band_left: Any
    band_right: Any
    Ends: Any  # numbers of keys of each batch row, or None
    rows_b: Any  # from one batch row's to the next one's


class Fp8Tensors(NamedTuple):
    """Tensors that computing warpgroups read and write, of all heads or of one."""

    Out: Any
    Lse: Any
    DescaleQ: Any
    DescaleK: Any
    DescaleV: Any
    Shift: Any
    Sinks: Any


class Fp8Warpgroup(NamedTuple):
    """State that a warpgroup keeps for its 64 queries of a block."""

    q: Any
    rows: Any
    shift: Any  # zeros where there is none
    factor: Any  # what q kᵀ is multiplied by; up to k's descale where blocks have one
    softcap: Any
    last: Any  # the block's last tile of keys
    band_left: Any
    band_right: Any
    seqlen_kv: Any  # of this batch row
