"""Named tuples that the decode kernel takes and passes on, as in shared/kernels/tuples.py. Imports no Triton.

Its numbers are parameters of their own. They have a type each, and the kernel is compiled for none of them: Triton has neither for the
members of a tuple.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class DecodeSwitches(NamedTuple):
    """Compile-time switches of the kernel."""

    SPLITS: Any  # the first axis of the grid where the kernel is compiled for it, else 0
    BLOCK_M: Any  # rows of a tile
    BLOCK_N: Any  # keys of a tile
    SLICES: Any  # as many as warps, each with keys of its own; or 1
    PARTS: Any  # partial results that are added up at a time
    KEPT: Any  # rows of a block that have partial results
    KEPT_ALL: Any  # the next power of two
    HEADS_KV: Any
    GROUP: Any  # query heads of each head of keys
    SEQLEN_Q: Any
    HEAD_DIM_QK: Any
    HEAD_DIM_V: Any
    QK_0: Any  # widths of the one or two tiles of a head of q and k; the second one may be 0
    QK_1: Any
    V_0: Any  # and of v
    V_1: Any
    BOUNDS: Any  # the unit with its own bounds: "batch", a row of it; "query", or "row", a query of a head
    BY_ROWS: Any  # rows may leave keys between theirs to none: the values there, which may be NaN, are not read
    MEANS: Any  # which keys a row without keys is the mean of; see plan.DecodePlan
    PAIRS_MASK: Any  # pairs are a mask, and not added
    ONE_KV: Any  # keys are the values, too
    CHANGE: Any  # the change of each score, by its name; see tile_parts.changed
    FAST_TANH: Any  # see tile_parts.tanh
    PLAIN: Any  # nothing but a positive scale changes the scores
    PRECISION: Any  # of products, as tl.dot names it
    NARROWER: Any  # keys in FP8 that fit into one element of Q
    EARLY: Any  # launched as a dependent of the kernel before (programmatic dependent launch)
    COMPILED: Any  # not in Triton's interpreter
    ALIGN: Any  # elements that every head and position begins at a multiple of


class LatentSwitches(NamedTuple):
    """Compile-time switches of the kernel over a latent, as in `DecodeSwitches` where the names are the same. Values are the latent."""

    BLOCK_M: Any
    BLOCK_N: Any
    KEPT: Any
    HEADS_KV: Any
    GROUP: Any
    SEQLEN_Q: Any
    HEAD_DIM_V: Any  # the rank
    V_0: Any
    V_1: Any
    HEAD_DIM_ROPE: Any  # dims of the part of keys that heads share, and the width of their tile; 0 where there is none
    ROPE: Any
    BOUNDS: Any
    MEANS: Any
    PAIRS_MASK: Any
    CHANGE: Any
    FAST_TANH: Any
    PLAIN: Any
    PRECISION: Any
    EARLY: Any
    ALIGN: Any


class MergeSwitches(NamedTuple):
    """Compile-time switches of the kernel that adds up partial results over a latent. Names shared with `LatentSwitches` have the same
    meaning."""

    BLOCK_M: Any
    PARTS: Any  # partial results that are added up at a time
    COLUMNS: Any  # dims that a program adds up
    KEPT: Any
    GROUP: Any
    SEQLEN_Q: Any
    HEAD_DIM_V: Any
    EARLY: Any


class KeyTile(NamedTuple):
    """Constants of a tile of keys. Where K and V come as pairs, head dims and ALIGN count those."""

    HEAD_DIM_QK: Any
    HEAD_DIM_V: Any
    QK_0: Any
    QK_1: Any
    V_0: Any
    V_1: Any
    TWOS: Any  # the FP8 dtype of K and V if they come as pairs: q_0 and out_0 are even dims then, q_1 and out_1 odd ones; else None
    LIFT: Any  # log2 of what weights are made larger by
    ALIGN: Any


class Queries(NamedTuple):
    """The rows of a program, in the shape of scores."""

    q_0: Any
    q_1: Any
    scale: Any  # the factor of q · k before all else, or None
    positions: Any
    lower: Any  # the first key that a row may use
    upper: Any  # the key after the last one
    none: Any  # which have no key, where such a row is a mean
    some_none: Any  # whether one has none
    slope: Any


class Cache(NamedTuple):
    """The keys and values of a head, with their mask and score operands."""

    K: Any
    V: Any
    stride_k: Any  # from one position to the next
    stride_v: Any
    Keys: Any
    Pairs: Any  # of each row
    pairs_q: Any
    pairs_k: Any
    Distances: Any
