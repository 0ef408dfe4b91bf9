"""Whether Hopper's forward is faster with products of a head dim's own size, as a sum of powers of two, than with the next power of two, by
what was measured.

head_parts_sm90.csv holds the TFLOP/s of both on an H200. A row speaks for shapes of its sort of mask and its head dims. Of these rows the
ones of the nearest length decide. A shape that no row speaks for gets the next power of two.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attn_compiler.lowerings.choice import nearest, shape_class
from attn_compiler.lowerings.shared.kernel_plan import head_dim_sums, head_dim_tiles
from attn_compiler.spec.attention import AttentionSpec

MEASURED = Path(__file__).with_name("head_parts_sm90.csv")
#: columns of MEASURED, in its order
COLUMNS = tuple("mask band head_dim_qk head_dim_v seqlen summed padded since case".split())


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsRow:
    """head_dims: of q and k, and of v, as sums. summed, padded: TFLOP/s on allowed pairs, of the forward alone."""

    mask: str
    band: str
    head_dims: tuple[int, int]
    seqlen: int
    summed: float
    padded: float


@functools.cache
def rows() -> tuple[PartsRow, ...]:
    """Of MEASURED."""
    with MEASURED.open(newline="") as file:
        return tuple(map(_row, csv.DictReader(file)))


def _row(line: Mapping[str, str]) -> PartsRow:
    return PartsRow(
        mask=line["mask"],
        band=line["band"],
        head_dims=(int(line["head_dim_qk"]), int(line["head_dim_v"])),
        seqlen=int(line["seqlen"]),
        summed=float(line["summed"]),
        padded=float(line["padded"]),
    )


def is_faster(spec: AttentionSpec) -> bool:
    """Whether it was, in all rows that are as near. Raises TypeError for head dims that are not known."""
    head_dims, seqlens = head_dim_sums(spec), shape_class.of(spec).seqlens
    if head_dims == head_dim_tiles(spec):
        return False
    sort = shape_class.sort_of_mask(spec), shape_class.of(spec).band
    there = [row for row in rows() if (row.mask, row.band) == sort and row.head_dims == head_dims]
    if not there or nearest.is_far(seqlens, min(row.seqlen for row in there)):
        return False
    return all(row.summed > row.padded for row in nearest.of(there, lambda row: (row.seqlen,), seqlens[:1]))
