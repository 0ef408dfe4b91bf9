"""Blocks and tiles of the kernels for Hopper, by head dim. Imports neither torch nor triton."""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared import parts as site_parts
from attn_compiler.lowerings.shared.kernel_plan import head_dim_tiles
from attn_compiler.spec import AttentionSpec

#: queries that a warpgroup's tensor cores take at once
ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """keys: of a tile.
    stages: tiles of keys and values that are in shared memory.
    query_stages: blocks whose queries are: with 2, those of the next block come while one is under way.
    consumers: warpgroups that compute, each 64 queries.
    registers: of a thread that computes, as many as the others leave.
    overlaps: a warpgroup has its softmax while the tensor cores take the outputs of its tile before. That takes registers for the weights
        of two tiles, and moves between them.
    """

    keys: int
    stages: int
    query_stages: int = 1
    consumers: int = 2
    registers: int = 240
    overlaps: bool = False

    @property
    def queries(self) -> int:
        """Of a block."""
        return ROWS * self.consumers

    @property
    def takes_turns(self) -> bool:
        """With more than two, a warpgroup finds the tensor cores free without that."""
        return self.consumers == 2

    @property
    def tile(self) -> Tile:
        """What lists of tiles are made for. warps: of one warpgroup."""
        return Tile(queries=self.queries, keys=self.keys, warps=4, stages=self.stages)


#: by the largest head dim, rounded up to a power of two, that they suffice for. H200, TFLOP/s on allowed pairs, S 2048, with
#: `overlaps` and without: D 64 causal 388, 379; D 128 causal 524, 552, padded 561 (of its own run), 558; D 256 at 8192 715, 758.
BLOCKS = {
    64: Blocks(keys=128, stages=4, query_stages=2, overlaps=True),
    128: Blocks(keys=128, stages=2, query_stages=2),
    256: Blocks(keys=64, stages=2),
}
#: For narrow heads, long sequences and masks without lists: causal, S 8192, 490 where two warpgroups have 428 (overlapping 470); without
#: a mask 527 and 459. At 2048 it is 369 and 388, with a window 299 and 331, padded 302 and 338.
THREE = Blocks(keys=128, stages=3, query_stages=2, consumers=3, registers=160)
_LONG = 4096


def blocks_of(spec: AttentionSpec) -> Blocks:
    """Those of a spec. Raises TypeError for head dims that are not known."""
    widest = max(head_dim_tiles(spec))
    if widest == min(BLOCKS) and _is_long(spec) and not _is_listed(spec):
        return THREE
    return next(blocks for limit, blocks in sorted(BLOCKS.items()) if widest <= limit)


def _is_long(spec: AttentionSpec) -> bool:
    """Lengths that are not known are not."""
    return all(isinstance(size, int) and size >= _LONG for size in (spec.seqlen_q, spec.seqlen_kv))


def _is_listed(spec: AttentionSpec) -> bool:
    """Whether blocks of a head differ in which tiles they visit, in other ways than by a diagonal."""
    plan = site_parts.of(spec)
    return plan.tiles or plan.unlisted or (plan.band is not None and plan.band.left is not None)


def leaves_from_queries(spec: AttentionSpec) -> bool:
    """Whether outputs leave from where the queries were: shared memory has no room for both."""
    qk, v = head_dim_tiles(spec)
    return qk == v == max(BLOCKS)
