"""Whether Hopper's backward that adds dq up in one order is faster than the Triton kernels' own, by what was measured.

Both give the same bits in every run. in_order_sm90.csv holds the TFLOP/s of both on an H200. A row speaks for shapes of its sort of mask
and its head dims. Of these rows the ones that are nearest to a shape decide. A shape that no row speaks for is left to the Triton kernels.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attn_compiler.lowerings.choice import nearest, shape_class
from attn_compiler.lowerings.shared import persistent
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

MEASURED = Path(__file__).with_name("in_order_sm90.csv")
#: columns of MEASURED, in its order
COLUMNS = tuple("mask band head_dim_from head_dim_to seqlen heads in_order triton since case".split())
#: what the other side is called
OTHER = "triton"
_RULE = "the backward that adds up in one order was measured to be faster than Triton's for such a shape"
_REMEDY = (
    "torch.use_deterministic_algorithms(False), if the last bits of gradients may differ from run to run, takes the backward that adds up "
    "as programs come"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderRow:
    """heads: of all batch rows, as many as are under way at once. in_order, triton: TFLOP/s on allowed pairs, of the backward alone.
    since: the date of the measurement."""

    mask: str
    band: str
    head_dims: tuple[int, int]
    seqlen: int
    heads: int
    in_order: float
    triton: float
    since: str

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"{self.in_order:.0f} TFLOP/s, {OTHER} {self.triton:.0f} (S {self.seqlen}, {self.heads} heads at once; H200, "
            f"{self.since})"
        )


@functools.cache
def rows() -> tuple[OrderRow, ...]:
    """Of MEASURED."""
    with MEASURED.open(newline="") as file:
        return tuple(map(_row, csv.DictReader(file)))


def _row(line: Mapping[str, str]) -> OrderRow:
    return OrderRow(
        mask=line["mask"],
        band=line["band"],
        head_dims=(int(line["head_dim_from"]), int(line["head_dim_to"])),
        seqlen=int(line["seqlen"]),
        heads=int(line["heads"]),
        in_order=float(line["in_order"]),
        triton=float(line["triton"]),
        since=line["since"],
    )


def check(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Refuses the backward in one order where it was slower, where nothing like the shape was measured, and for sizes that are not known:
    whether blocks wait for each other depends on how many there are."""
    sizes = _sizes(spec)
    if sizes is None:
        return [_refused("sizes that are not known when the graph is compiled", "torch.compile(dynamic=False)")]
    heads, (shorter, longer) = sizes
    there = _of_its_sort(spec)
    if not there:
        return [_refused(f"no row of a mask and head dims like these, {_sort_words(spec)}", _REMEDY)]
    least = min(row.seqlen for row in there)
    if nearest.is_far((shorter, longer), least):
        return [_refused(f"lengths of {shorter} and {longer}, and the nearest row has S {least}", _REMEDY)]
    wanted = (shorter, persistent.heads_at_once(heads, target.processors))
    near = nearest.of(there, lambda row: (row.seqlen, row.heads), wanted)
    slower = [row for row in near if row.in_order <= row.triton]
    return [_refused(slower[0].words, _REMEDY)] if slower else []


def _refused(observed: str, remedy: str) -> Reason:
    return Reason(code=Code.IN_ORDER_SLOWER, rule=_RULE, observed=observed, remedy=remedy)


def _sizes(spec: AttentionSpec) -> tuple[int, tuple[int, int]] | None:
    """Heads of all batch rows, and the smaller and the larger length; None where one is not known."""
    shape = shape_class.of(spec)
    if shape.is_any or not isinstance(spec.batch, int) or not isinstance(spec.num_heads_q, int):
        return None
    return spec.batch * spec.num_heads_q, shape.seqlens


def _of_its_sort(spec: AttentionSpec) -> list[OrderRow]:
    """Rows that speak for a spec, of any length."""
    shape = shape_class.of(spec)
    mask = shape_class.sort_of_mask(spec)
    return [
        row
        for row in rows()
        if (row.mask, row.band) == (mask, shape.band)
        and shape.head_dim is not None
        and row.head_dims[0] <= shape.head_dim <= row.head_dims[1]
    ]


def _sort_words(spec: AttentionSpec) -> str:
    shape = shape_class.of(spec)
    mask = shape_class.sort_of_mask(spec)
    return f"{mask}{'' if mask == shape.band else f' and {shape.band}'}, D {shape.head_dim}"
