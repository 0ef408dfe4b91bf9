"""Which lowering of linear attention is asked first: dated rows with what they rest on. To add a lowering: its line, and its row.

A call that no row speaks for keeps the model's own function, which the inner compiler compiles as it would without us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.lowerings.linear.fla_op import LinearFla
from attn_compiler.lowerings.linear.reference import LinearReference
from attn_compiler.lowerings.linear.triton_op import LinearTriton
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Decision, Reason, Refusal
from attn_compiler.spec.linear import LinearSpec
from attn_compiler.spec.target import Target

LinearLowering = LinearReference | LinearTriton | LinearFla
LINEAR_LOWERINGS: tuple[LinearLowering, ...] = (LinearReference(), LinearTriton(), LinearFla())


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRow:
    """The order for some machines and calls. Every field that is not None has to hold.

    device: "cpu" or "cuda".
    one_token: the call is of one token.
    training: the call needs gradients.
    lengths: the number of tokens is known and within these bounds, both included; None is no upper bound.
    recurrence, channel: as in LinearForm.
    sms: architectures from .. to, both included.
    dtypes: of q, or of x.
    widest: most channels of a head.
    batch: least rows of a batch, which has to be known.
    order: the lowerings, the first one first; none where the model's own function is to stay.
    since, why, measured: as in a row of attention (choice/rows.py).
    """

    device: str
    one_token: bool | None = None
    training: bool | None = None
    lengths: tuple[int, int | None] | None = None
    recurrence: str | None = None
    channel: bool | None = None
    sms: tuple[int, int] | None = None
    dtypes: tuple[str, ...] | None = None
    widest: int | None = None
    batch: int | None = None
    order: tuple[str, ...]
    since: str
    why: str
    measured: bool = True

    def fits(self, spec: LinearSpec, target: Target) -> bool:
        """Whether the row speaks for a call."""
        return (
            self.device == target.device
            and self._fits_machine(target)
            and self._fits_heads(spec)
            and self.one_token in (None, spec.length == 1)
            and self.training in (None, spec.needs_grad)
            and self._fits_length(spec)
            and self.recurrence in (None, spec.form.recurrence)
            and self.channel in (None, spec.form.channel)
        )

    def _fits_machine(self, target: Target) -> bool:
        return self.sms is None or self.sms[0] <= target.sm <= self.sms[1]

    def _fits_heads(self, spec: LinearSpec) -> bool:
        is_narrow = self.widest is None or max(spec.head_dim_k, spec.head_dim_v) <= self.widest
        is_large = self.batch is None or (isinstance(spec.batch, int) and spec.batch >= self.batch)
        return is_narrow and is_large and (self.dtypes is None or spec.dtype in self.dtypes)

    def _fits_length(self, spec: LinearSpec) -> bool:
        if self.lengths is None:
            return True
        least, most = self.lengths
        return isinstance(spec.length, int) and least <= spec.length and (most is None or spec.length <= most)


_SINCE = "2026-11-28"
_HEADS = "one call of a function of transformers, 4 heads, one thread of an AMD EPYC; linear_cpu.csv, times as fast as Inductor's"

_SINCE_HOPPER = "2026-11-29"
_HOPPER = (90, 90)
_ON_H200 = "an H200, bfloat16, linear_gpu.csv, times as fast as Inductor's with torch 2.11"
_LONGER = "Inductor unrolls longer ones, and was not timed on them; 32768 tokens take"

ROWS: tuple[LinearRow, ...] = (
    LinearRow(
        device="cpu",
        recurrence="ssd",
        one_token=True,
        order=(),
        since=_SINCE,
        why=f"{_HEADS}: one token 0.95 with heads of 16",
    ),
    LinearRow(
        device="cpu",
        recurrence="ssd",
        order=("linear_reference",),
        since=_SINCE,
        why=f"{_HEADS}: heads of 16, 64 tokens 7.7 and 9.9 in training, 512 tokens 18.7. Pairs of chunks and padding to 256 are left out",
    ),
    LinearRow(
        device="cpu",
        recurrence="delta",
        channel=False,
        training=True,
        lengths=(2, 2047),
        order=(),
        since=_SINCE,
        why=f"{_HEADS}: in training, heads of 16, 64 tokens 0.77, 512 tokens 0.92; heads of 128, 64 tokens 1.08",
    ),
    LinearRow(
        device="cpu",
        recurrence="delta",
        channel=False,
        lengths=(65, 2047),
        order=(),
        since=_SINCE,
        why=f"{_HEADS}: 512 tokens 0.98 with heads of 16, 0.93 with heads of 128; the scan over chunks costs the host",
    ),
    LinearRow(
        device="cpu",
        recurrence="delta",
        channel=False,
        order=("linear_reference",),
        since=_SINCE,
        why=(
            f"{_HEADS}: 64 tokens 1.14 and 1.39 with heads of 16 and 128, one token 1.02 and 1.03, 2048 tokens 1.01. The first step of "
            "2048 tokens takes 0.10 of Inductor's. A length that is not known has one graph, and not one for each number of chunks"
        ),
    ),
    LinearRow(
        device="cpu",
        recurrence="delta",
        channel=True,
        order=("linear_reference",),
        since=_SINCE,
        why=(
            f"{_HEADS}: heads of 16, 64 tokens 9.5, one token 0.99. The function solves 63 rows one after the other, and holds a number "
            "for each pair of a chunk and each channel"
        ),
    ),
    LinearRow(
        device="cuda",
        sms=_HOPPER,
        one_token=True,
        training=False,
        dtypes=("bfloat16",),
        widest=128,
        batch=64,
        order=("linear_triton",),
        since=_SINCE_HOPPER,
        why=(
            f"{_ON_H200}: a step of 64 rows 1.6, 1.5 and 2.0 in a CUDA graph, 1.2, 2.1 and 1.3 without, with heads of Qwen3-Next, Bamba "
            "and Kimi-Linear, whose state is written in place"
        ),
    ),
    LinearRow(
        device="cuda",
        sms=_HOPPER,
        one_token=True,
        order=(),
        since=_SINCE_HOPPER,
        why="an H200: a step was timed in bfloat16, with 64 rows; linear_gpu.csv",
        measured=False,
    ),
    LinearRow(
        device="cuda",
        sms=_HOPPER,
        recurrence="delta",
        channel=False,
        lengths=(2048, None),
        dtypes=("bfloat16",),
        widest=128,
        order=("linear_triton",),
        since=_SINCE_HOPPER,
        why=(
            f"{_ON_H200}, heads of Qwen3-Next: 4 x 2048 tokens in training 3.7, without wgmma 2.8; a prompt of 2048 tokens 14.3, without "
            f"wgmma 10.5. The first step of training takes 0.12 of Inductor's. {_LONGER}: 21 ms in training, 3.8 ms without"
        ),
    ),
    LinearRow(
        device="cuda",
        sms=_HOPPER,
        recurrence="delta",
        channel=True,
        lengths=(2048, None),
        dtypes=("bfloat16",),
        widest=128,
        order=("linear_triton",),
        since=_SINCE_HOPPER,
        why=(
            f"{_ON_H200}, heads of Kimi-Linear: 4 x 2048 tokens in training 10.4, without wgmma 9.5; a prompt of 2048 tokens 5.1, without "
            f"wgmma 4.5. The first step of training takes 0.17 of Inductor's. {_LONGER}: 56 ms in training, 15.8 ms without"
        ),
    ),
    LinearRow(
        device="cuda",
        sms=_HOPPER,
        recurrence="ssd",
        lengths=(2048, None),
        dtypes=("bfloat16",),
        widest=128,
        order=("linear_triton",),
        since=_SINCE_HOPPER,
        why=(
            "an H200, bfloat16, linear_gpu.csv, times as fast as the function in eager mode, heads of Bamba: 4 x 2048 tokens in training "
            "5.9, prompts of 2048 and 32768 tokens 11.5 and 11.3. Inductor's code generator of torch 2.11 fails on it (TypeError)"
        ),
    ),
    LinearRow(
        device="cuda",
        order=(),
        since=_SINCE_HOPPER,
        why="on GPUs calls in bfloat16 alone were timed, on sm90, with heads of at most 128 and from 2048 tokens on",
        measured=False,
    ),
)


def row_of(spec: LinearSpec, target: Target) -> LinearRow | None:
    """The first row that speaks for a call."""
    return next((row for row in ROWS if row.fits(spec, target)), None)


def decide(
    spec: LinearSpec, target: Target, asked: Sequence[str] | None, failed: Callable[[str], list[Reason]] = lambda _: []
) -> Decision:
    """The lowering of a call on a machine. asked: what the user named, in order; None: whatever is first. failed: what is known of a
    lowering's kernels that failed in this process.

    Reads nothing else: no environment, no tensor values, no globals.
    """
    by_name = {lowering.name: lowering for lowering in LINEAR_LOWERINGS}
    row = row_of(spec, target)
    order = asked if asked is not None else () if row is None else row.order
    refusals: list[Refusal] = []
    for name in order:
        if name == UNTOUCHED:
            return Decision(lowering=UNTOUCHED, refusals=tuple(refusals))
        reasons = by_name[name].why_not(spec, target) or failed(name)
        if not reasons:
            return Decision(lowering=name, refusals=tuple(refusals))
        refusals.append(Refusal(lowering=name, reasons=tuple(reasons)))
    if asked is None and not refusals:
        refusals.append(Refusal(lowering="any", reasons=(_none(target, row),)))
    return Decision(lowering=UNTOUCHED, refusals=tuple(refusals))


def _none(target: Target, row: LinearRow | None) -> Reason:
    return Reason(
        code=Code.OWN_IS_FASTEST,
        rule="a lowering is known to be faster than what the inner compiler makes of the model's own function",
        observed=f"none is on {target.words}" if row is None else f"{row.why} ({row.since}); this is {target.words}",
        remedy="options={'lowering': 'linear_reference'} takes it all the same",
    )
