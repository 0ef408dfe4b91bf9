"""The plan of one attention for the Triton kernels: pure data, made from the spec alone.

A mask is a conjunction of parts, each evaluated where it is cheap: a band (no tensor at all), an interval of keys for each
query, truth values of keys, document ids, a dense tensor. The tiles of the scores to visit follow from the band by
arithmetic. Every other part is only known at run time, and comes with lists of tiles (tiles.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.codec import Coded

#: Elements from one position of q, k, v or an output's gradient to the next, at most: offsets within a tile of up to 256 of them are of
#: 32 bits. Only an axis as long as 32768 heads of 256 lies between two positions that are farther apart.
FARTHEST = 2**31 // 256 - 1

#: Positions at most: sums with the bounds of bands, and 8 copies of what is added by distance, are of 32 bits.
MOST_POSITIONS = 2**28 - 1

#: blocks along the first axis of a grid, at most, and largest count of a loop
MOST_BLOCKS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """q - left <= k <= q + right, None where a side is open. from_end: positions are counted so that the last query meets the last
    key: q stands for q + Skv - Sq."""

    left: int | None = None
    right: int | None = None
    from_end: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The parts that mask and change the scores. Parts that read tensors name their operands, in this order:

    rows: int32 (2, B|1, Sq), contiguous: the first key that each query may use, and the one after the last.
    keys: bool (B|1, Skv), contiguous: which keys may be used at all.
    documents: two operands, int32 (B|1, Sq) and (B|1, Skv), contiguous: a query uses the keys of its own document.
    mask: bool (B|1, Hq|1, Sq|1, Skv|1), any strides: which pairs are allowed.
    tiles: int32 (B|1, Hq|1, nQ + 1, nK + 3), contiguous. A list for each block of queries: the number of blocks of keys that need the mask
        evaluated; first and end of a run of blocks that are allowed in full; the indices of the blocks that need the mask. Other blocks
        are not visited. With gradients also the same by blocks of keys, (B|1, Hq|1, nK' + 1, nQ' + 3). A block that goes beyond the last
        key is not allowed in full; one that goes beyond the last query may be. The last list means nothing: an axis that may be of size
        one would be guarded on.
    bias: a float tensor (B|1, Hq|1, Sq|1, Skv|1), any strides, is added to the scores.
    distances: a float tensor (Hq|1, 8, L), contiguous, L a multiple of 8 and at least Sq + Skv. Element [h, p, x] is added where k - q + Sq
        - 1 is x + p. The 8 copies let every query read from an aligned address. A gradient comes for p = 0 alone.
    slopes: float32 (Hq,), contiguous: slope · (k - q) is added.
    sinks: float (Hq,), contiguous.
    seed: int64 (1,) for dropout.
    few_pairs: the scores are known to be small, so nothing is worth leaving out.
    """

    band: Band | None = None
    rows: bool = False
    keys: bool = False
    documents: bool = False
    mask: bool = False
    bias: bool = False
    bias_grad: bool = False
    distances: bool = False
    distances_grad: bool = False
    slopes: bool = False
    sinks: bool = False
    sinks_grad: bool = False
    dropout: bool = False
    needs_grad: bool = False
    few_pairs: bool = False

    @property
    def tiles(self) -> bool:
        """Return whether the tiles to visit are read from lists."""
        return self._reads_mask and not self.few_pairs

    @property
    def unlisted(self) -> bool:
        """Return whether the mask is evaluated in every tile of the band: there are so few that lists would cost more than they save."""
        return self._reads_mask and self.few_pairs

    @property
    def _reads_mask(self) -> bool:
        return self.rows or self.keys or self.documents or self.mask

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the run-time tensors in the order in which the leaf op takes them."""
        has = {
            "rows": self.rows,
            "keys": self.keys,
            "documents_q": self.documents,
            "documents_k": self.documents,
            "mask": self.mask,
            "tiles": self.tiles,
            "tiles_by_key": self.tiles and self.needs_grad,
            "bias": self.bias,
            "distances": self.distances,
            "slopes": self.slopes,
            "sinks": self.sinks,
            "seed": self.dropout,
        }
        return tuple(name for name, here in has.items() if here)

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the operands that get a gradient."""
        wants = {"bias": self.bias_grad, "distances": self.distances_grad, "sinks": self.sinks_grad}
        return tuple(name for name in self.operands if wants.get(name, False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Coded):
    """All compile-time decisions on a call, which are the leaf op's text. one_kv: k and v are one tensor, which the forward reads once."""

    spec: AttentionSpec
    tiles: Tiles
    one_kv: bool = False


Call.codec = AttentionSpec.codec.extended(Call, Tiles, Tile, brief=True)


#: smallest head dim of a tile that a warpgroup of Hopper multiplies
_LEAST_HEAD_DIM = 64


#: elements that tensor cores multiply along a head dim at once
_STEP = 16
#: Wider heads leave shared memory no room for outputs beside the parts of queries.
_MOST_SUMMED = 128
#: Multi-head latent attention's are an exception: outputs are staged in the first part of the queries, which is as wide.
_LATENT = (192, 128)


def head_dim_tiles(spec: AttentionSpec) -> tuple[int, int]:
    """Return powers of two that hold the head dims of q and k, and of v, as Hopper's kernels take them. Raises TypeError for unknown
    ones."""
    qk, v = (max(_LEAST_HEAD_DIM, 1 << (d - 1).bit_length()) for d in _head_dims(spec))
    return qk, v


def head_dim_sums(spec: AttentionSpec) -> tuple[int, int]:
    """Return sums of powers of two that hold the head dims, such as 80 = 64 + 16; for narrow and wide heads, and unknown ones, as
    `head_dim_tiles`."""
    head_dims = _head_dims(spec)
    if head_dims == _LATENT:
        return head_dims
    if max(head_dims) > _MOST_SUMMED:
        return head_dim_tiles(spec)
    qk, v = (max(_LEAST_HEAD_DIM, -(-d // _STEP) * _STEP) for d in head_dims)
    return qk, v


def _head_dims(spec: AttentionSpec) -> tuple[int, int]:
    if not isinstance(spec.head_dim_qk, int) or not isinstance(spec.head_dim_v, int):
        raise TypeError(f"why_not refuses unknown head dims, got {spec.head_dim_qk!r} and {spec.head_dim_v!r}")
    return spec.head_dim_qk, spec.head_dim_v
