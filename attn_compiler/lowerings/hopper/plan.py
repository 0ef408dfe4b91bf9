"""Blocks and tiles of the kernels for Hopper, by head dim. Imports neither torch nor triton."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.lowerings.choice import head_parts
from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Plan, head_dim_sums, head_dim_tiles
from attn_compiler.spec import dims
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import BYTES

#: queries that a warpgroup multiplies at once
ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBlocks:
    """Blocks and tiles of the forward.

    keys: of a tile.
    stages: tiles of keys and values in shared memory.
    query_stages: blocks of queries in shared memory; with 2, the next block's are loaded while one is computed.
    consumers: warpgroups that compute, each on 64 queries.
    registers: of a thread that computes, all that the others leave.
    overlaps: a warpgroup computes its softmax while the tensor cores multiply the weights of its last tile by values.
        That takes registers for the weights of two tiles, and moves between them.
    added_stages: tiles of the added tensor in shared memory, if there is one.
    part: of head dims above 256, the dims of a tile that are loaded together (kernels/forward_wide_sm90.py); else 0.
    added_early: an added tile with elements of at most so many bytes is read while its scores are multiplied.
        Compiled for D 128 with 4 bytes, 10 registers of a thread are spilled that way.
    """

    keys: int
    stages: int
    query_stages: int = 1
    consumers: int = 2
    registers: int = 240
    overlaps: bool = False
    added_stages: int = 0
    added_early: int = 2
    part: int = 0

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return ROWS * self.consumers

    @property
    def takes_turns(self) -> bool:
        """True if two warpgroups take turns at the tensor cores. With more, one finds them free anyway; for wide heads it was slower."""
        return self.consumers == 2 and not self.part

    def reads_early(self, size: int) -> bool:
        """Return whether elements of so many bytes are read while their scores are multiplied."""
        return size <= self.added_early

    @property
    def tile(self) -> Tile:
        """The tile of the lists. warps: of one warpgroup."""
        return Tile(queries=self.queries, keys=self.keys, warps=4, stages=self.stages)


#: by the largest head dim that each entry supports, rounded up to a power of two. H200, TFLOP/s on allowed pairs, S 2048, with
#: `overlaps` and without: D 64 causal 388, 379; D 128 causal 524, 552, padded 561 (of its own run), 558; D 256 at 8192 715, 758.
BLOCKS = {
    64: ForwardBlocks(keys=128, stages=4, query_stages=2, overlaps=True),
    128: ForwardBlocks(keys=128, stages=2, query_stages=2),
    256: ForwardBlocks(keys=64, stages=2),
}
#: For narrow heads, long sequences and masks without lists: causal, S 8192, 490 TFLOP/s where two warpgroups reach 428 (overlapping 470);
#: without a mask 527 and 459. At 2048 it is 369 and 388, with a window 299 and 331, padded 302 and 338.
THREE = ForwardBlocks(keys=128, stages=3, query_stages=2, consumers=3, registers=160)
_LONG = 4096
#: For head dims that are sums of powers of two, as `BLOCKS`: as many stages as there is room for.
SUMMED = {
    96: ForwardBlocks(keys=128, stages=3, query_stages=2),
    128: ForwardBlocks(keys=128, stages=2, query_stages=2),
    192: ForwardBlocks(keys=128, stages=2),
}
#: Where a bias or biases by distance are added, as `BLOCKS`: beside them there is no room for the next block's queries at D 128.
ADDED = {
    64: ForwardBlocks(keys=128, stages=3, query_stages=2, overlaps=True, added_stages=1, added_early=4),
    128: ForwardBlocks(keys=128, stages=2, added_stages=1),
    256: ForwardBlocks(keys=64, stages=2, added_stages=1),
}
#: For head dims above 256; `part` is 256 where q and k are multiples of it. TFLOP/s with parts of 256 and 128 (wide_h200.csv): D 512,
#: causal, S 8192, 431 and 410, with turns 408 and 407, without `overlaps` 422 and 405; D 384, S 4096, 286 and 358, with turns 356.
WIDE = ForwardBlocks(keys=64, stages=6, overlaps=True, part=128)
#: dims of the values of one pass
WIDE_PASS = 256
#: bytes of shared memory for the tiles of a program, which leaves some for barriers
_ROOM = 226 * 1024
_HALF_BYTES, _WIDE = 2, 8


def multiplied(spec: AttentionSpec) -> tuple[int, int]:
    """Return the head dims of the forward's products: sums of powers of two where that was measured to be faster, else powers of two. For
    wide heads v's is that of one pass. Raises TypeError for head dims that are not known."""
    if is_wide(spec):
        return -(-int(spec.head_dim_qk) // WIDE.part) * WIDE.part, WIDE_PASS
    return head_dim_sums(spec) if head_parts.is_faster(spec) and not has_added(spec) else head_dim_tiles(spec)


def is_wide(spec: AttentionSpec) -> bool:
    """Return whether registers hold only a part of the outputs' head dims. Raises TypeError for head dims that are not known."""
    return max(head_dim_tiles(spec)) > max(BLOCKS)


def has_added(spec: AttentionSpec) -> bool:
    """Return whether a bias or biases by distance are added to the scores."""
    plan = site_parts.make_plan(spec)
    return plan.bias or plan.distances


def blocks_of(spec: AttentionSpec) -> ForwardBlocks:
    """Return the blocks of a spec. Raises TypeError for head dims that are not known."""
    qk, v = multiplied(spec)
    widest = max(qk, v)
    if is_wide(spec):
        part = WIDE.part if qk % WIDE_PASS else WIDE_PASS
        stages = (_ROOM // _HALF_BYTES - WIDE.queries * qk) // (WIDE.keys * part)
        return dataclasses.replace(WIDE, stages=stages, part=part)
    if has_added(spec):
        return next(blocks for limit, blocks in sorted(ADDED.items()) if widest <= limit)
    if (qk, v) != head_dim_tiles(spec):
        return next(blocks for limit, blocks in sorted(SUMMED.items()) if widest <= limit)
    if widest == min(BLOCKS) and _is_long(spec) and not _is_listed(spec):
        return THREE
    return next(blocks for limit, blocks in sorted(BLOCKS.items()) if widest <= limit)


def _is_long(spec: AttentionSpec) -> bool:
    """Return whether all calls are long: below that, three warpgroups are slower."""
    return all(dims.range_of(spec, size)[0] >= _LONG for size in (spec.seqlen_q, spec.seqlen_kv))


def _is_listed(spec: AttentionSpec) -> bool:
    """Return whether blocks of a head differ in the tiles that they visit by more than a diagonal."""
    plan = site_parts.make_plan(spec)
    return plan.tiles or plan.unlisted or (plan.band is not None and plan.band.left is not None)


def is_ordered(spec: AttentionSpec) -> bool:
    """Return whether programs take blocks by the lengths of their lists, long ones first.

    Intervals and documents make blocks of any length, in any order. Other masks' blocks grow with their number, or are about as long.

    H200, forward and backward, time without the order over time with it: packed rows of 1 to 512 tokens, D 64, 1.44 and 1.21. Documents
    of 1024, causal, D 128: 1.19 and 1.06. Padded on the right: 0.97 to 0.98 and 0.95 to 0.99.
    """
    return site_parts.make_plan(spec).tiles and bool({"rows", "documents"} & site_parts.parts(spec).kinds)


def leaves_from_queries(spec: AttentionSpec, added: int = 0) -> bool:
    """Return whether outputs are stored from the queries' shared memory, which has no room for both. Their head dim's parts are then the
    queries' first ones. added: bytes of an element that is added to a score."""
    qk, v = multiplied(spec)
    blocks = blocks_of(spec)
    if blocks.part:
        return False
    elements = blocks.queries * (blocks.query_stages * qk + v) + blocks.stages * blocks.keys * (qk + v)
    return elements * _HALF_BYTES + blocks.added_stages * blocks.queries * blocks.keys * added > _ROOM


@dataclass(frozen=True, kw_only=True, slots=True)
class GradBlocks:
    """Blocks of the backward. queries: of a tile. stages: tiles of queries in shared memory. registers: of a thread that computes."""

    queries: int
    stages: int
    registers: int = 240

    @property
    def keys(self) -> int:
        """Keys of a block: two warpgroups compute."""
        return 2 * ROWS

    def sum_columns(self, qk: int) -> int:
        """Return the columns of dq that a warpgroup adds up of a tile: half of the tile, or of 128 queries half of one half."""
        return qk // 2 if self.queries == ROWS else qk

    @property
    def tile(self) -> Tile:
        """The tile of the lists. warps: of one warpgroup."""
        return Tile(queries=self.queries, keys=self.keys, warps=4, stages=self.stages)


#: from this many keys on, a causal backward is at least as fast as cuDNN's
_FROM = 1024
#: By the largest head dim, rounded up to a power of two: D 64 has 452 TFLOP/s, and with 64 queries 387 (backward_trials_h200.csv).
GRAD_BLOCKS = {64: GradBlocks(queries=128, stages=2), 128: GradBlocks(queries=64, stages=2)}
#: of narrow heads where tiles of 128 queries are slower or were not timed; a bias leaves no room for them
NARROW = GradBlocks(queries=64, stages=3, registers=216)


def grad_blocks_of(spec: AttentionSpec, parts: site_parts.Parts | Plan) -> GradBlocks:
    """Return the blocks of a spec. Raises TypeError for head dims that are not known, and KeyError for those that are too wide. Speed of
    128 queries over that of 64 at D 64, beside flash-attn-4 (hopper_fa4_h200.csv): causal documents 0.97, other documents 1.06, padding
    1.02 to 1.07. Dense masks and slopes were not timed."""
    widest = max(head_dim_tiles(spec))
    is_whole = (parts.documents and parts.band) or parts.mask or parts.bias or parts.slopes
    return NARROW if is_whole and widest == min(GRAD_BLOCKS) else GRAD_BLOCKS[widest]


def grad_dims(spec: AttentionSpec) -> tuple[int, int]:
    """Return the head dims of the backward's products: 64 + 16 or 64 + 32 where that is enough, else powers of two. Two warpgroups share
    two parts of dq."""
    both = zip(head_dim_tiles(spec), head_dim_sums(spec), strict=True)
    qk, v = (summed if summed > ROWS and summed.bit_count() == 2 else tile for tile, summed in both)
    return qk, v


def has_backward(spec: AttentionSpec) -> bool:
    """Return whether the backward takes a spec. Wider heads leave no registers for the sums of dk and dv. dv is stored from the memory of
    dq's sums, which is as large as dk. There is room for slopes and for half precision biases without a gradient, and for nothing else
    that is added to the scores."""
    qk, v = head_dim_tiles(spec)
    plan, bias = site_parts.make_plan(spec), spec.added_tensor
    is_wide = bias is not None and BYTES.get(bias.dtype, _WIDE) > _HALF_BYTES
    if plan.distances or plan.bias_grad or (plan.bias and is_wide):
        return False
    return v <= qk and qk in GRAD_BLOCKS


def cudnn_is_faster(spec: AttentionSpec) -> bool:
    """Return whether cuDNN's backward was measured to be the faster one of sites that both take (select_hopper_h200.csv).

    cuDNN's time over this kernel's on an H200: causal, from 1024 tokens on, 0.97 to 1.10, geometric mean 1.02. Without a mask 0.90 to
    0.99, and narrow heads 1.02 (hopper_fa4_h200.csv). Causal, 512 tokens, head dim 96 and 128 0.92 to 0.97, 64 1.14.
    """
    most = dims.range_of(spec, spec.seqlen_kv)[1]
    is_short = most is not None and most < _FROM
    return max(head_dim_tiles(spec)) > min(GRAD_BLOCKS) and (is_short or site_parts.make_plan(spec).band is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class WideGradBlocks:
    """Blocks of a pass of the backward for head dims above 256: for dq, for dk or for dv.

    rows: of a block. tile: rows of the other side that are loaded at once.
    part, part_v: dims of q and k, and of v and the output's gradient, in one buffer of shared memory.
    stages, stages_v: such buffers of a tile; for dv all are `stages`.
    """

    rows: int
    tile: int
    part: int
    part_v: int
    stages: int
    stages_v: int
    registers: int = 240

    @property
    def launched(self) -> Tile:
        """The tile of a launch. warps: of one warpgroup."""
        return Tile(queries=self.rows, keys=self.tile, warps=4, stages=self.stages)


#: dims of one buffer of shared memory, for q and k, and for v; the fewest buffers for v; rows of a tile
WIDE_PART, WIDE_PART_V, _LEAST_V, _WIDE_TILE = 128, 64, 3, 64
#: For the widest heads with a causal mask. H200, D 512, TFLOP/s with tiles of 64 and with these: S 8192 dq 468, 483, dk 380, 477; S 2048
#: 371 and 419, 344 and 427 (wide_backward_h200.csv).
_WIDEST, _DIAGONAL = 512, {"tile": 32, "part_v": 128, "stages": 8, "stages_v": 3}
#: head dims, and the fewest keys, at which the passes were measured to be faster than the Triton kernels: with 2048 keys, 2.3 times
_FASTER, _FASTER_FROM = (320, 512), 1024


def wide_head_dims(spec: AttentionSpec) -> tuple[int, int]:
    """Return head dims of q and of v rounded up to whole parts, for the passes for dq and dk. Raises TypeError for unknown head dims."""
    qk, v = int(spec.head_dim_qk), int(spec.head_dim_v)
    return -(-qk // WIDE_PART) * WIDE_PART, -(-v // WIDE_PART_V) * WIDE_PART_V


def wide_blocks_of(spec: AttentionSpec, grad: str) -> WideGradBlocks:
    """Return the blocks of the pass for the gradient of "q", "k" or "v". Raises TypeError for head dims that are not known."""
    if grad == "v":
        of = blocks_of(spec)
        places = {"part": of.part, "part_v": of.part, "stages": of.stages, "stages_v": of.stages}
        return WideGradBlocks(rows=of.queries, tile=of.keys, registers=of.registers, **places)
    qk, v = wide_head_dims(spec)
    plan = site_parts.make_plan(spec)
    if (qk, v) == (_WIDEST, _WIDEST) and plan.band is not None and not plan.tiles:
        return WideGradBlocks(rows=ROWS, part=WIDE_PART, **_DIAGONAL)
    room = _ROOM // _HALF_BYTES - ROWS * (qk + v + _WIDE_TILE) - _LEAST_V * _WIDE_TILE * WIDE_PART_V
    stages = room // (_WIDE_TILE * WIDE_PART)
    stages_v = _LEAST_V + (room - stages * _WIDE_TILE * WIDE_PART) // (_WIDE_TILE * WIDE_PART_V)
    parts = {"part": WIDE_PART, "part_v": WIDE_PART_V}
    return WideGradBlocks(rows=ROWS, tile=_WIDE_TILE, stages=stages, stages_v=stages_v, **parts)


def wide_grad_tiles(tiles: Tiles, spec: AttentionSpec) -> Tiles:
    """Replace the tiles of lists by those of these passes: all of queries and keys in blocks of 128."""
    by_key = Tile(queries=_WIDE_TILE, keys=2 * ROWS, warps=4, stages=1)
    return dataclasses.replace(tiles, forward=blocks_of(spec).tile, grad_kv=by_key)


def has_wide_backward(spec: AttentionSpec) -> bool:
    """Return whether the passes for head dims above 256 take a spec. Raises TypeError for head dims that are not known."""
    plan = site_parts.make_plan(spec)
    return is_wide(spec) and not (plan.mask or plan.bias or plan.distances)


def wide_is_faster(spec: AttentionSpec) -> bool:
    """Return whether those passes were measured to be faster than the Triton kernels (wide_backward_h200.csv).

    Triton's time over theirs on an H200, D 512: up to a diagonal, S 8192 and 2048, 3.0 and 2.6; padded besides 2.6; no mask 3.0. D 384
    2.5, D 320 2.6. With a window of 128 1.0. Nothing else was measured, and no GPU has run the tiles of 32 with softcaps or sinks.
    """
    plan, kinds = site_parts.make_plan(spec), site_parts.parts(spec).kinds
    is_window = plan.band is not None and plan.band.left is not None
    if is_window or plan.slopes or spec.score.changes or not kinds <= {"band", "keys", "lengths"}:
        return False
    least, most = _FASTER
    is_there = spec.head_dim_qk == spec.head_dim_v and least <= int(spec.head_dim_qk) <= most
    longest = (dims.range_of(spec, size)[1] for size in (spec.seqlen_q, spec.seqlen_kv))
    return is_there and all(most is None or most >= _FASTER_FROM for most in longest)
