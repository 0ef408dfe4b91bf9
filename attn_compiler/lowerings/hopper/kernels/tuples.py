"""Named tuples that the kernels for Hopper take and pass on, as in shared/kernels/tuples.py. Imports no Triton.

Their tensors are parameters of their own: Triton's launcher makes no descriptor of a tuple's member.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class ForwardSwitches(NamedTuple):
    """Compile-time switches of the forward."""

    HEAD_DIM_QK: Any
    HEAD_DIM_V: Any
    QK_ALL: Any  # the power of two, or the sum of such (head_parts_sm90.py), that holds the head dim of q and k
    V_ALL: Any  # and of v
    BLOCK_M: Any  # queries of a block: 64 for each warpgroup that computes
    BLOCK_N: Any  # keys of a tile
    STAGES: Any  # tiles of keys and values in shared memory
    QUERY_STAGES: Any  # blocks of queries in shared memory: 2 if they may be loaded while the block before is computed
    HAS_LEFT: Any
    HAS_RIGHT: Any
    MASK_ALL: Any  # no tile goes without its mask
    SOFTCAP: Any
    MARKS: Any  # rows that have come out as NaN are marked in the lse
    ORDERED: Any  # blocks come by the lengths of their lists
    CONSUMERS: Any  # warpgroups that compute, 2 or 3
    REGISTERS: Any  # of a thread that computes
    OUT_IN_Q: Any  # outputs are stored from the queries' shared memory
    OVERLAPS: Any  # a warpgroup's softmax overlaps with the outputs of its tile before, which takes registers
    TURNS: Any  # two warpgroups take turns: one's products while the other has its softmax
    ADDED_STAGES: Any  # tiles of what is added to the scores in shared memory, for each warpgroup; 0: nothing is
    ADDED_EARLY: Any  # the added tile is read while q kᵀ is in flight, which takes registers
    BY_DISTANCE: Any  # biases by distance are added, else a dense bias
    BATCH_LAST: Any  # blocks of all batch rows come before the next head's
    LOW_AGAIN: Any  # rows whose scores may all be very low (a mask by addition) are marked, too
    PART: Any  # of a head dim wider than 256: the dims of a tile in shared memory; else 0
    TILE: Any  # rows of a tile whose parts have places in turn: BLOCK_N


class ForwardWork(NamedTuple):
    """Work of all programs."""

    section: Any  # heads that take turns, see `turn`
    blocks: Any  # of queries of a head
    heads_of_all: Any  # B · Hq
    sizes: Any  # shared Sizes
    Lists: Any  # of tiles, or None
    lists: Any  # ListStrides


class RingBarriers(NamedTuple):
    """Barriers of queries and of the ring's parts: loaded, and free to be overwritten."""

    q_full: Any
    q_empty: Any
    full: Any
    empty: Any


class Adding(NamedTuple):
    """A tensor of logical (batch, head, row, key) that is added to the scores. Axes of size 1 broadcast, but for rows."""

    batches: Any
    heads: Any
    rows: Any  # queries, or by distance 64
    columns: Any  # keys, or by distance all that there are
    stride_b: Any
    stride_h: Any
    stride_q: Any
    zero: Any  # by distance: the column of a key beside the first of 64 queries


class AddedTiles(NamedTuple):
    """Tiles of the added tensor in shared memory, of each stage those of all warpgroups. All are None where nothing is added."""

    of: Any  # their descriptor
    at: Any  # Adding
    tiles: Any
    full: Any  # when they have come
    empty: Any  # and may be written over


class Masks(NamedTuple):
    """Operands of masks and scores, of all batch rows and heads, or of one."""

    Rows: Any
    Keys: Any
    DocumentsQ: Any
    DocumentsK: Any
    Slopes: Any
    Bits: Any  # of a dense mask, 32 keys a word


class Visits(NamedTuple):
    """Tiles that a block visits: first those that need their mask, then a run of those that don't."""

    List: Any  # where the former are listed, or None: on both sides of the run
    partial: Any  # how many need their mask
    first: Any  # of them
    second: Any
    full_first: Any
    full_last: Any  # the tile after the run


class Warpgroup(NamedTuple):
    """State of a warpgroup's 64 queries of a block. Of each row, in the layout of a tile's rows: least, most, document, rows."""

    q: Any
    least: Any  # the first key that a row may use
    most: Any  # the last one
    document: Any  # its document, or None
    rows: Any  # the query's number
    factor: Any  # what q kᵀ is multiplied by
    cap: Any  # and then tanh of that, where there is a softcap
    slope: Any  # or None
    bits: Any  # where its words of a dense mask begin, or None
    of_added: Any  # what is added is multiplied by that before it joins q kᵀ, or the softcap's tanh


class GradSwitches(NamedTuple):
    """Compile-time switches of the backward kernel."""

    HEAD_DIM_QK: Any
    HEAD_DIM_V: Any
    QK_ALL: Any  # the power of two that holds the head dim of q and k
    V_ALL: Any  # and of v
    QK: Any  # dims of q and k that are multiplied, of QK_ALL in shared memory
    V: Any  # and of v
    BLOCK_M: Any  # queries of a tile: 64, or 128 in two halves
    BLOCK_N: Any  # keys of a block: 64 for each of two warpgroups
    STAGES: Any  # tiles of queries and of the output's gradient that are in shared memory
    SUM_COLUMNS: Any  # of dq that a warpgroup has room for: half of QK_ALL with 64 queries, else all
    HAS_LEFT: Any
    HAS_RIGHT: Any
    MASK_ALL: Any  # no tile goes without its mask
    SOFTCAP: Any
    MARKS: Any  # gradients that have come out as NaN raise the flag
    ORDERED: Any  # blocks come by the lengths of their lists
    REGISTERS: Any  # of a thread that computes
    IN_ORDER: Any  # blocks take turns at dq
    ADDED: Any  # a bias is added to the scores, of which the copy engine brings tiles


class GradTiles(NamedTuple):
    """Buffers of a backward in shared memory."""

    q: Any
    g: Any  # of the output's gradient
    k: Any  # 64 rows for each of two warpgroups, as v
    v: Any
    grads: Any  # of scores, (keys, queries)
    sums: Any  # what is added to dq, and then gradients on their way out
    stats: Any  # -lse of a tile's queries in units of log 2, and their delta
    first: Any  # query of a tile
    turns: Any  # of 2 · STAGES tiles: where each one's counter is, and how many blocks add before this one; or None
    turn_full: Any  # barriers: when each of these may be added; or None
    added: Any  # of a bias, (queries, keys) of each of two warpgroups, or None
    work: Any  # of a block its number among those of all heads, -1 after the last one; its tiles; how many of them are masked


class GradBarriers(NamedTuple):
    """Barriers of a backward's tiles: loaded, and free to be overwritten."""

    kv_full: Any
    kv_empty: Any
    q_full: Any
    q_empty: Any  # of all that comes with a tile of queries
    g_full: Any
    stats_full: Any
    grads_full: Any
    work_full: Any
    work_empty: Any


class QueryMasks(NamedTuple):
    """Mask operands of the queries of a batch row."""

    Rows: Any
    rows_side: Any  # MaskStrides.rows_side
    Documents: Any
    Bits: Any  # of a dense mask, of one head: 32 queries a word


class KeyBlock(NamedTuple):
    """Mask state of the 64 keys of one warpgroup. keys, least, most and document have one element a key, in the layout of a tile's rows."""

    keys: Any  # the key's number
    least: Any  # the first query that may use it
    most: Any  # the last one
    document: Any  # its document, or None
    factor: Any  # what q kᵀ is multiplied by
    cap: Any  # and then tanh of that, where there is a softcap
    slope: Any  # or None
    bits: Any  # where its words of a dense mask begin, or None


class WideSwitches(NamedTuple):
    """Compile-time switches of the backward's kernels for head dims above 256. A program computes gradients of a block's rows (queries or
    keys); tiles are of the other side."""

    HEAD_DIM_QK: Any
    HEAD_DIM_V: Any
    QK_ALL: Any  # whole parts that hold the head dim of q and k
    V_ALL: Any  # and of v; in the pass for dv the dims of it that come at once
    BLOCK_M: Any  # queries of a block or of a tile
    BLOCK_N: Any  # keys of a tile or of a block
    TILE: Any  # rows of a tile
    TOGETHER: Any  # blocks that have one list of tiles
    PART: Any  # dims of q and k that have a place of shared memory
    PART_V: Any  # and of v and the output's gradient
    STAGES: Any  # places of a tile's parts of q or k; in the pass for dv of all parts
    STAGES_V: Any  # places of a tile's parts of v or the output's gradient
    HAS_LEFT: Any
    HAS_RIGHT: Any
    MASK_ALL: Any  # no tile goes without its mask
    SOFTCAP: Any
    MARKS: Any  # gradients that have come out as NaN raise the flag
    ORDERED: Any  # blocks come by the lengths of their lists
    BY_KEY: Any  # a block's rows are keys
    CONSUMERS: Any  # warpgroups that have rows of their own
    QUERY_STAGES: Any  # blocks whose rows are in shared memory
    REGISTERS: Any  # of a thread that computes


class WideTiles(NamedTuple):
    """Buffers in shared memory for dq or dk of wide heads: parts of a block's own rows, and of the other side's tiles."""

    own: Any  # of q, by key of k
    own_v: Any  # of the output's gradient, by key of v
    others: Any  # of k, by key of q
    others_v: Any  # of v, by key of the output's gradient
    grads: Any  # of the weights, and then of the scores: (rows, others)


class WideBarriers(NamedTuple):
    """Barriers of `WideTiles`: loaded, and free to be overwritten."""

    own_full: Any
    own_empty: Any
    own_v_full: Any
    own_v_empty: Any
    full: Any
    empty: Any
    v_full: Any
    v_empty: Any
    given: Any  # gradients of the weights
    grads_full: Any  # of the scores
    grads_empty: Any
