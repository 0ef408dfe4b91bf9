"""The order of lowerings of linear attention: rows.toml, dated data with its evidence. To add a lowering: its line, and its row.

A call without a row keeps the model's own function, which the inner compiler compiles as it would without us.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.lowerings.choice import first, rows
from attn_compiler.lowerings.choice.rows import EvidenceRow
from attn_compiler.lowerings.linear.reference import LinearReference
from attn_compiler.lowerings.linear.triton_op import LinearTriton
from attn_compiler.reasons.decisions import Decision, Reason, Refusal
from attn_compiler.spec.linear import LinearSpec
from attn_compiler.spec.target import Target

LinearLowering = LinearReference | LinearTriton
LINEAR_LOWERINGS: tuple[LinearLowering, ...] = (LinearReference(), LinearTriton())
_BY_NAME = {lowering.name: lowering for lowering in LINEAR_LOWERINGS}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRow(EvidenceRow):
    """The order for some machines and calls. Every field that is not None has to hold.

    one_token: the call is of one token.
    lengths: the number of tokens is known and within these bounds, both included; None is no upper bound.
    recurrence, channel: as in LinearForm.
    widest: most channels of a head.
    batch: least rows of a batch, which has to be known.
    """

    one_token: bool | None = None
    lengths: tuple[int, int | None] | None = None
    recurrence: str | None = None
    channel: bool | None = None
    widest: int | None = None
    batch: int | None = None

    def fits(self, spec: LinearSpec, target: Target) -> bool:
        """Return whether the row applies to a call."""
        return (
            self.serves(target, spec.dtype, spec.needs_grad)
            and self.one_token in (None, spec.length == 1)
            and self._fits_length(spec)
            and self.recurrence in (None, spec.form.recurrence)
            and self.channel in (None, spec.form.channel)
            and (self.widest is None or max(spec.head_dim_k, spec.head_dim_v) <= self.widest)
            and (self.batch is None or (isinstance(spec.batch, int) and spec.batch >= self.batch))
        )

    def _fits_length(self, spec: LinearSpec) -> bool:
        if self.lengths is None:
            return True
        least, most = self.lengths
        return isinstance(spec.length, int) and least <= spec.length and (most is None or spec.length <= most)


ROWS: tuple[LinearRow, ...] = tuple(
    row
    for entry in tomllib.loads(Path(__file__).with_name("rows.toml").read_text())["linear"]
    for row in rows.read(entry, LinearRow)
)


def row_of(spec: LinearSpec, target: Target) -> LinearRow | None:
    """Return the first row that applies to a call."""
    return next((row for row in ROWS if row.fits(spec, target)), None)


def decide(
    spec: LinearSpec, target: Target, asked: Sequence[str] | None, failed: Callable[[str], list[Reason]] = lambda _: []
) -> Decision:
    """Return the lowering of a call on a machine. asked: the user's, in order; None: the first that fits. failed: returns reasons of a
    lowering whose kernels failed in this process.

    Reads nothing else: no environment, no tensor values, no globals.
    """

    def objection(name: str) -> Refusal | None:
        reasons = [] if name == UNTOUCHED else _BY_NAME[name].why_not(spec, target) or failed(name)
        return Refusal(lowering=name, reasons=tuple(reasons)) if reasons else None

    if asked is not None:
        return first.first_unopposed(asked, objection)
    row = row_of(spec, target)
    decision = first.first_unopposed(() if row is None else row.order, objection)
    remedy = "options={'lowering': 'linear_reference'} takes a kernel all the same"
    return first.with_reason(decision, row, target, "function", remedy)
