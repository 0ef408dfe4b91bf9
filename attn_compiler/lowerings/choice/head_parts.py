"""Whether Hopper's forward is faster with products of a head dim's own size, as a sum of powers of two, than with the next power of two, by
what was measured.

head_parts_sm90.csv holds the TFLOP/s of both on an H200. A row speaks for shapes of its sort of mask and its head dims. Of these rows the
ones of the nearest length decide. A shape that no row speaks for gets the next power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.lowerings.choice import nearest, shape_class
from attn_compiler.lowerings.choice.measured import Table
from attn_compiler.lowerings.shared.parts.kernel_plan import head_dim_sums, head_dim_tiles
from attn_compiler.spec.attention import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsRow:
    """head_dim_qk, head_dim_v: as sums. summed, padded: TFLOP/s on allowed pairs, of the forward alone. since, case: the date,
    and what was measured."""

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
    """Whether it was, in all rows that are as near. Raises TypeError for head dims that are not known."""
    head_dims, seqlens = head_dim_sums(spec), shape_class.of(spec).seqlens
    if head_dims == head_dim_tiles(spec):
        return False
    sort = shape_class.sort_of_mask(spec), shape_class.of(spec).band
    there = [
        row for row in TABLE.rows() if (row.mask, row.band, row.head_dim_qk, row.head_dim_v) == (*sort, *head_dims)
    ]
    near = nearest.of_length(there, seqlens) if there else ""
    return not isinstance(near, str) and all(row.summed > row.padded for row in near)
