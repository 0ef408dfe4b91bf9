"""Whether FP8 is faster than the model's own dtype for a shape: by what was measured, which `python -m benchmarks.fp8_rows` writes down.

fp8_sm90.csv holds effective TFLOP/s of whole attentions on an H200, in FP8 with finding scales and rounding, and in bfloat16 beside them.
The nearest length of the same sort of mask and head dim speaks for a shape. What has no row is not refused, but for lengths far below
all that have one.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attn_compiler.fp8_recipe import CurrentScaling
from attn_compiler.lowerings import priorities, shape_class
from attn_compiler.report import Reason
from attn_compiler.spec import AttentionSpec
from attn_compiler.target import Target

MEASURED = Path(__file__).with_name("fp8_sm90.csv")
#: columns of MEASURED, in its order
COLUMNS = (
    *("lowering", "mask", "head_dim_from", "head_dim_to", "seqlen", "grouped", "training", "scaling", "backward"),
    *("tflops", "since", "case"),
)
_SM = 90
_YES_NO = {"yes": True, "no": False, "": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One lowering's speed. grouped: with fewer heads of k and v, which take less time to round. training: of forward and backward
    together. scaling: of `scaling_of`, "" for no FP8. backward: that is in FP8 too, as the recipe said; None: no FP8. since: the
    date of the measurement."""

    lowering: str
    mask: str
    head_dims: tuple[int, int]
    seqlen: int
    grouped: bool
    training: bool
    scaling: str
    backward: bool | None
    tflops: float
    since: str

    def fits(self, lowering: str, spec: AttentionSpec) -> bool:
        """Whether it is of that lowering, mask, head dim and pass, and no faster for having fewer heads than the spec."""
        shape = shape_class.of(spec)
        first, last = self.head_dims
        return (
            self.lowering == lowering
            and self.mask == shape.mask
            and self.grouped <= shape.grouped
            and self.training == spec.needs_grad
            and self.backward in (None, spec.needs_grad and spec.fp8 is not None and spec.fp8.backward)
            and shape.head_dim is not None
            and first <= shape.head_dim <= last
        )


@functools.cache
def rows() -> tuple[Row, ...]:
    """Of MEASURED."""
    with MEASURED.open(newline="") as file:
        return tuple(map(_row, csv.DictReader(file)))


def _row(line: Mapping[str, str]) -> Row:
    return Row(
        lowering=line["lowering"],
        mask=line["mask"],
        head_dims=(int(line["head_dim_from"]), int(line["head_dim_to"])),
        seqlen=int(line["seqlen"]),
        grouped=line["grouped"] == "yes",
        training=line["training"] == "yes",
        scaling=line["scaling"],
        backward=_YES_NO[line["backward"]],
        tflops=float(line["tflops"]),
        since=line["since"],
    )


def estimate(lowering: str, spec: AttentionSpec, seqlen: int | None = None) -> Row | None:
    """What was measured nearest to a spec's length, or to another one; None for unknown lengths, or if there is nothing like it. Of
    those the rows of its grouping, and of these of its way to find scales, where there are any: the length decides more."""
    shape = shape_class.of(spec)
    if shape.seqlens is None:
        return None
    wanted = math.log(max(shape.seqlens[1] if seqlen is None else seqlen, 1))
    fitting = [row for row in rows() if row.fits(lowering, spec)]
    nearest = min((row.seqlen for row in fitting), key=lambda length: abs(math.log(length) - wanted), default=None)
    there = [row for row in fitting if row.seqlen == nearest]
    there = [row for row in there if row.grouped == shape.grouped] or there
    own = [row for row in there if row.scaling in ("", scaling_of(spec))]
    return max(own or there, key=lambda row: row.tflops, default=None)


def scaling_of(spec: AttentionSpec) -> str:
    """How a site's recipe finds scales, as far as it costs time: for each "block", "head" or "tensor", which the last two read twice; or
    "before" that step; or "accurate", with a rotation or a mean. "" without a recipe."""
    if spec.fp8 is None:
        return ""
    if spec.fp8.hadamard or spec.fp8.smooth_k:
        return "accurate"
    scaling = spec.fp8.scaling
    return scaling.granularity if isinstance(scaling, CurrentScaling) else "before"


def check(spec: AttentionSpec, target: Target, lowering: str, other: str) -> list[Reason]:
    """Refuses a lowering in FP8 that was slower than `other`, which the site gets without a recipe; or that was not measured, where the
    fastest of those that were is slower. And where all that was measured is more than twice as long: rounding takes the larger share
    of the time, the shorter the sequence."""
    mine = estimate(lowering, spec) or _fastest(spec)
    its = None if mine is None else estimate(other, spec, mine.seqlen)
    seqlens = shape_class.of(spec).seqlens
    if target.sm != _SM or mine is None or its is None or seqlens is None:
        return []
    is_short = 2 * seqlens[1] < mine.seqlen
    if mine.tflops > its.tflops and not is_short:
        return []
    passes = "forward and backward" if spec.needs_grad else "forward"
    observed = (
        f"{mine.lowering} with rounding {mine.tflops:.0f} TFLOP/s (S {mine.seqlen}), {other} in {spec.dtype} {its.tflops:.0f} "
        f"(S {its.seqlen}); {passes}, H200, {mine.since}"
    )
    if is_short:
        observed = f"S {seqlens[1]}, of which the shortest that was measured is more than twice as long: {observed}"
    remedy = "give Fp8Recipe(force=True)"
    return [Reason(rule="FP8 is faster than the model's dtype for such a shape", observed=observed, remedy=remedy)]


def _fastest(spec: AttentionSpec) -> Row | None:
    found = [row for name in priorities.FP8 if (row := estimate(name, spec)) is not None]
    return max(found, key=lambda row: row.tflops, default=None)
