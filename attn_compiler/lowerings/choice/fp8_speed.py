"""Measured speed of FP8 beside the model's own dtype, by shape. `python -m benchmarks.fp8_rows` writes the rows.

fp8_sm90.csv holds effective TFLOP/s of whole attentions on an H200, in FP8 with finding scales and rounding, and in bfloat16 beside them. A
row applies to shapes with its class of mask and its head dims whose queries use about as many keys. Rounding takes as long for each query,
and attention takes longer with each key. A shape without a row is not refused, unless it has far fewer keys than every row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attn_compiler.lowerings.base import FP8
from attn_compiler.lowerings.choice import shape_class
from attn_compiler.lowerings.choice.measured import Table, nearest_rows
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason, refuse
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.fp8_recipe import CurrentScaling
from attn_compiler.spec.target import Target

_SM = 90
#: Masks that are looked up by their band alone: everything else in them costs the same with and without FP8
_BY_BAND = ("sinks", "softcap", "lengths")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """Measured speed of one lowering.

    keys: mean number of keys that a query may use. grouped: with fewer heads of k and v, which take less time to round. training: of
        forward and backward together. scaling: of `scaling_of`, "" for no FP8. backward: the backward is in FP8 too, as the recipe said;
        None: no FP8.
    since, case: the date, and the measured case.
    """

    lowering: str
    mask: str
    head_dim_from: int
    head_dim_to: int
    seqlen: int
    keys: float
    grouped: bool
    training: bool
    scaling: str
    backward: bool | None
    tflops: float
    since: str
    case: str

    @property
    def words(self) -> str:
        """Sizes of the row, for people."""
        return f"S {self.seqlen}" + (f", {self.keys:.0f} keys a query" if self.mask == "window" else "")

    def fits(self, asked: SpeedAsked) -> bool:
        """Return whether the row is of that mask, head dim and pass, and no faster for having fewer heads than the site."""
        return (
            self.mask == asked.mask
            and self.training == asked.training
            and self.head_dim_from <= asked.head_dim <= self.head_dim_to
            and self.grouped <= asked.grouped
            and self.backward in (None, asked.backward)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedAsked:
    """Columns of `SpeedRow` that a site determines.

    mask, head_dim, grouped, training: as in `SpeedRow`. scaling: of `scaling_of`. backward: its recipe wants it in FP8 too.
    keys: mean number of keys that a query may use. seqlen: of keys.
    """

    mask: str
    head_dim: int
    grouped: bool
    training: bool
    scaling: str
    backward: bool
    keys: float
    seqlen: int


TABLE = Table("fp8_sm90.csv", SpeedRow)


@functools.lru_cache(maxsize=1024)
def asked_by(spec: AttentionSpec) -> SpeedAsked | None:
    """Return a spec's values of the rows' columns; None for unknown lengths or head dims."""
    shape, sizes = shape_class.classify(spec), sizes_of(spec)
    if sizes is None or shape.head_dim is None:
        return None
    return SpeedAsked(
        mask=shape.band if shape.mask in _BY_BAND else shape.mask,
        head_dim=shape.head_dim,
        grouped=shape.grouped,
        training=spec.needs_grad,
        scaling=scaling_of(spec),
        backward=spec.needs_grad and spec.fp8 is not None and spec.fp8.backward,
        keys=sizes[0],
        seqlen=sizes[1],
    )


def estimate(lowering: str, spec: AttentionSpec, like: SpeedRow | None = None) -> SpeedRow | None:
    """Return the row nearest to a spec's number of keys, and then to its length; None if nothing like the spec was measured.

    like: a row whose number of keys and length replace the spec's. Among rows that are equally near, rows with the spec's grouping are
    preferred, and among these rows with its way to find scales: the length decides more.
    """
    asked = asked_by(spec)
    if asked is None:
        return None
    wanted = (asked.keys, asked.seqlen) if like is None else (like.keys, like.seqlen)
    fitting = [row for row in TABLE.rows() if row.lowering == lowering and row.fits(asked)]
    there = nearest_rows(fitting, lambda row: (row.keys, row.seqlen), wanted)
    there = [row for row in there if row.grouped == asked.grouped] or there
    own = [row for row in there if row.scaling in ("", asked.scaling)]
    return max(own or there, key=lambda row: row.tflops, default=None)


def sizes_of(spec: AttentionSpec) -> tuple[float, int] | None:
    """Return (the mean number of keys that the band lets a query use, the number of all keys); None where a length is not known."""
    if not isinstance(spec.seqlen_q, int) or not isinstance(spec.seqlen_kv, int):
        return None
    return keys_in_band(parts.parts(spec).band, spec.seqlen_q, spec.seqlen_kv), spec.seqlen_kv


def keys_in_band(band: Band | None, seqlen_q: int, seqlen_kv: int) -> float:
    """Return the mean number of keys that the band lets a query use."""
    if band is None:
        return seqlen_kv
    shift = seqlen_kv - seqlen_q if band.from_end else 0
    no_right = seqlen_q * seqlen_kv
    ends = no_right if band.right is None else _clipped(shift + band.right + 1, seqlen_q, seqlen_kv)
    firsts = 0 if band.left is None else _clipped(shift - band.left, seqlen_q, seqlen_kv)
    return (ends - firsts) / max(seqlen_q, 1)


def _clipped(first: int, count: int, limit: int) -> int:
    """Return the sum of `count` successive numbers from `first` on, each clipped to 0 .. `limit`."""
    return _clipped_below(first + count, limit) - _clipped_below(first, limit)


def _clipped_below(end: int, limit: int) -> int:
    """Return the sum of all numbers from 0 to `end`, without it, each clipped to `limit`."""
    growing = min(max(end, 0), limit + 1)
    return growing * (growing - 1) // 2 + max(end - limit - 1, 0) * limit


def scaling_of(spec: AttentionSpec) -> str:
    """Return how a site's recipe finds scales, as far as it costs time. "block", "head" or "tensor": a scale for each; the last two read
    the input twice. "before": scales of former steps. "accurate": with a rotation or a mean. "": no recipe."""
    if spec.fp8 is None:
        return ""
    if spec.fp8.hadamard or spec.fp8.smooth_k:
        return "accurate"
    scaling = spec.fp8.scaling
    return scaling.granularity if isinstance(scaling, CurrentScaling) else "before"


def check_fp8_speed(spec: AttentionSpec, target: Target, lowering: str, other: str) -> list[Reason]:
    """Refuse a lowering in FP8 that was measured slower than `other`, the lowering that the site gets without a recipe.

    A lowering that was not measured is compared by the fastest FP8 row. Sites with less than half as many keys for a query as the nearest
    row are refused, too: the fewer keys, the larger the share of time that rounding takes.
    """
    if target.sm != _SM:
        return []
    rows = (estimate(name, spec) for name in FP8)
    mine = estimate(lowering, spec) or max(filter(None, rows), key=lambda row: row.tflops, default=None)
    its = None if mine is None else estimate(other, spec, mine)
    asked = asked_by(spec)
    if mine is None or its is None or asked is None:
        return []
    is_short = 2 * asked.keys < mine.keys
    if mine.tflops > its.tflops and not is_short:
        return []
    passes = "forward and backward" if spec.needs_grad else "forward"
    observed = (
        f"{mine.lowering} with rounding {mine.tflops:.0f} TFLOP/s ({mine.words}), {other} in {spec.dtype} {its.tflops:.0f} "
        f"({its.words}); {passes}, H200, {mine.since}"
    )
    if is_short:
        own = f"S {asked.seqlen}, {asked.keys:.0f} keys a query"
        observed = f"{own}, of which the fewest that were measured are more than twice as many: {observed}"
    remedy = "give Fp8Recipe(force=True)"
    return refuse(Code.FP8_SLOWER, "FP8 is faster than the model's dtype for such a shape", observed, remedy)
