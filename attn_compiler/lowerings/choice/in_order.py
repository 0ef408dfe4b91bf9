"""Measured speed of Hopper's backward that sums dq in one order, beside the Triton kernels' own.

Both give the same bits in every run. in_order_sm90.csv holds the TFLOP/s of both on an H200. A row applies to shapes with its class of mask
and its head dims. Among these rows the nearest to a shape decide. A shape without a row is left to the Triton kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler.lowerings.choice import shape_class
from attn_compiler.lowerings.choice.measured import Table
from attn_compiler.lowerings.shared.launching import persistent
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.target import Target

#: name of the other side
OTHER = "triton"
_RULE = "the backward that adds up in one order was measured to be faster than Triton's for such a shape"
_REMEDY = "call torch.use_deterministic_algorithms(False) if the last bits of gradients may differ from run to run"


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderRow:
    """Speed of both backwards: TFLOP/s on allowed pairs. heads: of all batch rows, as many as run at once. since, case: the date, and the
    measured case."""

    mask: str
    band: str
    head_dim_from: int
    head_dim_to: int
    seqlen: int
    heads: int
    in_order: float
    triton: float
    since: str
    case: str

    @property
    def words(self) -> str:
        """Text for people."""
        return (
            f"{self.in_order:.0f} TFLOP/s, {OTHER} {self.triton:.0f} (S {self.seqlen}, {self.heads} heads at once; H200, "
            f"{self.since})"
        )


TABLE = Table("in_order_sm90.csv", OrderRow)


def check_order_speed(spec: AttentionSpec, target: Target) -> list[Reason]:
    """Refuse the backward in one order where it was slower, unmeasured, or sizes are unknown, which decide whether blocks wait for each
    other."""
    sizes = _sizes(spec)
    if sizes is None:
        return [_refused("sizes that are not known when the graph is compiled", "torch.compile(dynamic=False)")]
    heads, seqlens = sizes
    shape, mask = shape_class.classify(spec), shape_class.sort_of_mask(spec)
    near = TABLE.nearest(
        lambda row: (
            (row.mask, row.band) == (mask, shape.band)
            and shape.head_dim is not None
            and row.head_dim_from <= shape.head_dim <= row.head_dim_to
        ),
        seqlens,
        lambda row: (row.heads,),
        (persistent.heads_at_once(heads, target.processors),),
    )
    if isinstance(near, str):
        own = mask if mask == shape.band else f"{mask} and {shape.band}"
        return [_refused(near or f"no row of a mask and head dims like these, {own}, D {shape.head_dim}", _REMEDY)]
    slower = [row for row in near if row.in_order <= row.triton]
    return [_refused(slower[0].words, _REMEDY)] if slower else []


def _refused(observed: str, remedy: str) -> Reason:
    return Reason(code=Code.IN_ORDER_SLOWER, rule=_RULE, observed=observed, remedy=remedy)


def _sizes(spec: AttentionSpec) -> tuple[int, tuple[int, int]] | None:
    """Return the heads of all batch rows, and the smaller and the larger length; None where one is not known."""
    shape = shape_class.classify(spec)
    if shape.is_any or not isinstance(spec.batch, int) or not isinstance(spec.num_heads_q, int):
        return None
    return spec.batch * spec.num_heads_q, shape.seqlens
