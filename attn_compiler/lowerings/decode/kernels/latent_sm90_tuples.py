"""Named tuples that Hopper's kernel over a latent takes and passes on, as in shared/kernels/tuples.py. Imports no Triton."""

from __future__ import annotations

from typing import Any, NamedTuple


class HopperSwitches(NamedTuple):
    """Compile-time switches of the kernel. Names shared with `LatentSwitches` have the same meaning."""

    GROUP: Any
    SEQLEN_Q: Any
    KEPT: Any
    HALF: Any  # of the rank
    ROPE: Any
    MEANS: Any
    STAGES: Any  # tiles of keys that are in shared memory
    REGISTERS: Any  # of a thread that computes the right half


class LatentTiles(NamedTuple):
    """Buffers in shared memory."""

    q: Any  # (2, rows, half)
    q_rope: Any
    left: Any  # (stages, keys, half) of the latent
    right: Any
    rope: Any
    weights: Any  # of a tile
    decay: Any  # of each row


class LatentBarriers(NamedTuple):
    """Barriers of the tiles: loaded, and free to be overwritten."""

    q_full: Any
    q_rope_full: Any
    left_full: Any  # with the part beside the latent
    left_empty: Any
    right_full: Any
    right_empty: Any
    weights_full: Any
    weights_empty: Any
    turn: Any  # scores have been computed
