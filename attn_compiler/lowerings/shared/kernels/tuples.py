"""Named tuples that the Triton kernels take, and pass to each other. Nothing here imports triton.

A kernel takes each tensor as a parameter of its own, since addresses change from call to call, and everything else in tuples:

- Numbers: `sizes.seqlen_q`. Triton treats each member as a parameter: it compiles variants for a 1 and for a multiple of 16.
- Constants: `HOW: tl.constexpr`, one tuple of plain values. `how: tl.constexpr = members(HOW)` has a constant for each member
  (releases.py), where HOW.BLOCK_M itself may be a Python int, which can't be the length of a tile.

Inside a kernel further tuples group related values. Members may be None there, but Triton 3.6 returns no tuple that has
such a member, nor one with a constant. So these tuples are made where they are used, and no function returns them.
Triton's cache key does not contain the field names of a tuple made by position. So tuples are always made by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """Strides of a tensor of logical BHSD; the last stride is 1."""

    b: Any
    h: Any
    s: Any


class MaskStrides(NamedTuple):
    """Strides of a mask's operands (kernel_plan.Plan); 0 where one broadcasts, or is not there."""

    rows_side: Any  # from the first keys to the ends of the intervals
    rows_b: Any
    keys_b: Any
    documents_qb: Any
    documents_kb: Any
    mask_b: Any
    mask_h: Any
    mask_q: Any
    mask_k: Any


class ListStrides(NamedTuple):
    """Strides of the lists of tiles."""

    tiles_b: Any
    tiles_h: Any
    tiles_row: Any  # from one block's list to the next one's


class AddedStrides(NamedTuple):
    """Strides of the operands that are added to the scores."""

    bias_b: Any
    bias_h: Any
    bias_q: Any
    bias_k: Any
    distances_h: Any
    distances_phase: Any  # from one copy of the numbers to the next, see tile_parts.load_distances


class DescaleStrides(NamedTuple):
    """Strides of the factors of FP8 numbers; 0 where one broadcasts."""

    descale_qb: Any
    descale_qh: Any
    descale_kb: Any
    descale_kh: Any
    descale_vb: Any
    descale_vh: Any


class GradStrides(NamedTuple):
    """Strides of the gradient of a bias."""

    grad_b: Any
    grad_h: Any
    grad_q: Any
    grad_k: Any


class Sizes(NamedTuple):
    """Numbers of an attention that a kernel is not compiled for."""

    heads_q: Any
    group: Any  # query heads of each head of keys
    seqlen_q: Any
    seqlen_kv: Any
    band_left: Any  # a query q may use keys from q - band_left on, where HAS_LEFT
    band_right: Any  # and up to q + band_right, where HAS_RIGHT
    scale: Any
    changed_by: Any  # the number of the change of each score
    dropout_p: Any


class Switches(NamedTuple):
    """Constants that a kernel is compiled for."""

    BLOCK_M: Any  # queries of a tile
    BLOCK_N: Any  # keys of a tile
    HEAD_DIM_QK: Any
    HEAD_DIM_V: Any
    QK_0: Any  # widths of the one or two tiles of a head of q and k; the second one may be 0
    QK_1: Any
    V_0: Any  # and of v
    V_1: Any
    HAS_LEFT: Any
    HAS_RIGHT: Any
    CHANGE: Any  # the change of each score, by its name; see tile_parts.changed
    FAST_TANH: Any  # see tile_parts.tanh
    PLAIN: Any  # nothing but a positive scale changes the scores
    DROPOUT: Any
    PRECISION: Any  # of products, as tl.dot names it
    ALIGN: Any  # elements that every head and position begins at a multiple of
    MASK_ALL: Any  # no tile goes without its mask
    ONE_KV: Any  # keys are the values, too
    MARKS_LOW: Any  # see forward.attention_forward


class MaskOperands(NamedTuple):
    """Operands of a mask: of all batch rows and heads, or of one; None where it has no such part."""

    Rows: Any
    Keys: Any
    DocumentsQ: Any
    DocumentsK: Any
    Mask: Any


class Positions(NamedTuple):
    """A tensor with a row for each position, of one batch row and head."""

    base: Any
    stride: Any  # from one position to the next
    length: Any  # number of positions


class Pairs(NamedTuple):
    """A tensor with an element for each pair of a query and a key, of one batch row and head."""

    base: Any  # None where there is none
    q: Any  # strides
    k: Any


class QueryRows(NamedTuple):
    """A block of queries, and their mask values: (M, 1), or None."""

    start: Any  # the first query
    queries: Any
    lower: Any  # the first key that it may use
    upper: Any  # the key after the last one
    document: Any


class KeyMasks(NamedTuple):
    """Mask values of keys and of pairs, in one batch row and head."""

    Keys: Any
    Documents: Any
    mask: Any  # Pairs


class Added(NamedTuple):
    """Biases of one batch row and head."""

    bias: Any  # Pairs
    Distances: Any
    phase: Any  # AddedStrides.distances_phase
    slope: Any


#: tuples whose members a launch names one by one, by the parameter
TAKEN: dict[str, type[Any]] = {
    "stride_grad": GradStrides,
    "stride_descales": DescaleStrides,
    "sizes": Sizes,
    "HOW": Switches,
}
