"""What the kernel over a latent for Hopper takes and hands on as named tuples: shared/kernels/tuples.py says how. Imports no triton."""

from __future__ import annotations

from typing import Any, NamedTuple


class HopperSwitches(NamedTuple):
    """What the kernel is compiled for. The names of `LatentSwitches` are the same things."""

    GROUP: Any
    SEQLEN_Q: Any
    KEPT: Any
    HALF: Any  # of the rank
    ROPE: Any
    MEANS: Any
    STAGES: Any  # tiles of keys that are in shared memory
    REGISTERS: Any  # of a thread that computes the right half


class LatentTiles(NamedTuple):
    """In shared memory."""

    q: Any  # (2, rows, half)
    q_rope: Any
    left: Any  # (stages, keys, half) of the latent
    right: Any
    rope: Any
    weights: Any  # of a tile
    decay: Any  # of each row


class LatentBarriers(NamedTuple):
    """When tiles have come, and when they may be written over."""

    q_full: Any
    q_rope_full: Any
    left_full: Any  # with the part beside the latent
    left_empty: Any
    right_full: Any
    right_empty: Any
    weights_full: Any
    weights_empty: Any
    turn: Any  # scores have been computed
