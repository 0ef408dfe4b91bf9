"""Measured speed of Hopper's kernel beside the Triton family's, for masks and biases with an element for each score and biases by distance.

hopper_added_sm90.csv holds the TFLOP/s of both, side by side on one GPU. A row applies to sites with its part and its head dims. Among
these rows the ones of the nearest length decide. A site without a row is left to the Triton kernels, unless the user names this one. With
gradients, dense masks and biases that want none need rows of the backward, too. The backward of other biases is the Triton family's either
way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_compiler.lowerings.choice import shape_class
from attn_compiler.lowerings.choice.measured import Table
from attn_compiler.lowerings.shared.parts import site_parts
from attn_compiler.lowerings.shared.parts.site_parts import PartKind
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec

#: parts that need a measured row
PARTS: frozenset[PartKind] = frozenset({"bias", "distances", "mask"})
FORWARD, BACKWARD = "forward", "backward"
#: the two families that are compared
FAMILY, OTHER = "hopper", "triton"
_WORDS: Mapping[PartKind, str] = {"mask": "a dense mask", "bias": "a dense bias", "distances": "a bias by distance"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedRow:
    """Speed of both families: TFLOP/s on allowed pairs, of one pass alone. device, since, case: the GPU, the date, and the measured
    case."""

    part: str
    pass_: str
    head_dim_from: int
    head_dim_to: int
    seqlen: int
    hopper: float
    triton: float
    device: str
    since: str
    case: str

    @property
    def words(self) -> str:
        """Text for people."""
        return f"{self.hopper:.0f} TFLOP/s, {OTHER} {self.triton:.0f} (S {self.seqlen}; {self.device}, {self.since})"


TABLE = Table("hopper_added_sm90.csv", AddedRow)


def check_added_speed(spec: AttentionSpec, name: str) -> list[Reason]:
    """Return why a lowering that was not asked for by name does not serve a site: a reason for each slower or unmeasured part."""
    wanted = site_parts.parts(spec).kinds & PARTS if name == FAMILY else frozenset()
    return [
        reason for part in sorted(wanted) for which in _passes(spec, part) for reason in _check_part(spec, part, which)
    ]


def _passes(spec: AttentionSpec, part: PartKind) -> tuple[str, ...]:
    """Return the passes that this family's kernels run."""
    has_backward = part == "mask" or (part == "bias" and not site_parts.parts(spec).bias_grad)
    return (FORWARD, BACKWARD) if spec.needs_grad and has_backward else (FORWARD,)


def _check_part(spec: AttentionSpec, part: PartKind, which: str) -> list[Reason]:
    shape = shape_class.classify(spec)
    near = TABLE.nearest(
        lambda row: (
            (row.part, row.pass_) == (part, which)
            and shape.head_dim is not None
            and row.head_dim_from <= shape.head_dim <= row.head_dim_to
        ),
        shape.seqlens,
    )
    if isinstance(near, str):
        none = f"no row of the {which} with {_WORDS[part]} and such sizes, D {shape.head_dim}"
        return [_refused(part, near or none)]
    slower = [row for row in near if row.hopper <= row.triton]
    return [_refused(part, slower[0].words)] if slower else []


def _refused(part: PartKind, observed: str) -> Reason:
    return Reason(
        code=Code.ADDED_SLOWER,
        rule=f"with {_WORDS[part]} this kernel was measured to be faster than Triton's for such a shape",
        observed=observed,
        remedy=f"options={{'lowering': {FAMILY!r}}} takes this kernel all the same",
    )
