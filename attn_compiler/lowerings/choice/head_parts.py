"""Measured speed of Hopper's forward with two ways to cover a head dim: a sum of powers of two, or the next power of two.

head_parts_sm90.csv holds the TFLOP/s of both on an H200. A row applies to shapes with its class of mask and its head dims. Among these rows
the ones of the nearest length decide. A shape without a row gets the next power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.lowerings.choice import shape_class
from attn_compiler.lowerings.choice.measured import Table
from attn_compiler.lowerings.shared.parts.kernel_plan import head_dim_sums, head_dim_tiles
from attn_compiler.spec.attention import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsRow:
    """Speed of both ways. head_dim_qk, head_dim_v: as sums. summed, padded: TFLOP/s on allowed pairs, of the forward. since: the date."""

    mask: str
    band: str
    head_dim_qk: int
    head_dim_v: int
    seqlen: int
    summed: float
    padded: float
    since: str
    case: str


TABLE = Table("head_parts_sm90.csv", PartsRow)


def is_faster(spec: AttentionSpec) -> bool:
    """Return whether the sum was faster in all of the nearest rows. Raises TypeError for head dims that are not known."""
    head_dims, seqlens = head_dim_sums(spec), shape_class.classify(spec).seqlens
    if head_dims == head_dim_tiles(spec):
        return False
    own = (shape_class.sort_of_mask(spec), shape_class.classify(spec).band, *head_dims)
    near = TABLE.nearest(lambda row: (row.mask, row.band, row.head_dim_qk, row.head_dim_v) == own, seqlens)
    return not isinstance(near, str) and all(row.summed > row.padded for row in near)
