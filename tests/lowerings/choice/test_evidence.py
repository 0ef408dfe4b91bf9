"""What is said of a choice: the row it rests on, and times that are made of measured speeds, or nothing."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler import index_expr
from attn_compiler.lowerings.choice import evidence, fp8_speed, priorities
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import Causal, Dense, Flag, KeyPadding, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import ScoreSpec
from attn_compiler.spec.target import Target

H200 = Target.fake()
CAUSAL = MaskSpec(kinds=(Causal(),), flag=Flag.CALLED)


def _spec(batch: int = 2, seqlen: int | str = 8192, mask: MaskSpec = CAUSAL, **others: object) -> AttentionSpec:
    size = seqlen if isinstance(seqlen, int) else 1
    q = TensorSpec(shape=(batch, 16, seqlen, 128), strides=(16 * size * 128, size * 128, 128, 1), dtype="bfloat16")
    spec = AttentionSpec(q=q, k=q, v=q, mask=mask, score=ScoreSpec(scale=0.1), device="cuda", out_dtype="bfloat16")
    return dataclasses.replace(spec, **others)  # type: ignore[arg-type]


def test_the_row_that_decides_is_the_evidence() -> None:
    found, row = evidence.evidence(_spec(), H200), priorities.row_of(_spec(), H200)
    assert found is not None
    assert row is not None
    assert (found.order, found.why, found.since) == (row.order, row.why, row.since)
    assert (found.measured, found.length) == (True, None)


def test_lengths_that_are_not_known_are_said() -> None:
    found = evidence.evidence(_spec(seqlen="s0"), H200)
    assert found is not None
    assert found.length == "any, chosen as for 4096"
    # A CPU's rows do not count them as any number.
    on_cpu = evidence.evidence(_spec(seqlen="s0", device="cpu"), Target.fake(device="cpu"))
    assert on_cpu is not None
    assert on_cpu.length is None


def test_a_machine_that_no_row_knows_has_no_evidence() -> None:
    assert evidence.evidence(_spec(), Target.fake(sm=30)) is None


def test_milliseconds_are_work_by_measured_speed() -> None:
    found = evidence.estimate(_spec(), H200, "hopper")
    speeds = {
        row.lowering: row.tflops
        for row in fp8_speed.TABLE.rows()
        if (row.mask, row.head_dim_to, row.seqlen, row.training) == ("causal", 128, 8192, False)
        and not row.grouped
        and not row.scaling
    }
    # Two products of 8192 x 8193 / 2 pairs, 128 numbers each, for 2 x 16 heads.
    work = 2 * 2 * 128 * (8192 * 8193 / 2) * 32
    assert found is not None
    assert found.milliseconds == pytest.approx(1e3 * work / speeds["hopper"] / 1e12)
    assert (found.other, found.since) == ("sdpa_cudnn", "2026-11-22")
    assert found.other_milliseconds == pytest.approx(1e3 * work / speeds["sdpa_cudnn"] / 1e12)
    assert found.gained == pytest.approx(1e3 * work / 1e12 * (1 / speeds["sdpa_cudnn"] - 1 / speeds["hopper"]))


def test_a_backward_is_counted() -> None:
    one, both = (evidence.estimate(_spec(needs_grad=grad), H200, "hopper") for grad in (False, True))
    assert one is not None
    assert both is not None
    assert both.milliseconds > 3 * one.milliseconds


def test_pytorchs_kernel_computes_all_pairs_beside_a_window() -> None:
    """So half the length takes a quarter of the time, where ours takes half."""
    dense = Dense(shape=(1, 1, 8192, 8192), dtype="bool")
    window = MaskSpec(kinds=(SlidingWindow(left=1023, right=0),), dense=dense)
    long, short = (evidence.estimate(_spec(seqlen=s, mask=window), H200, "hopper") for s in (8192, 4096))
    assert long is not None
    assert short is not None
    assert long.other_milliseconds is not None
    assert short.other_milliseconds is not None
    assert long.other_milliseconds / short.other_milliseconds == pytest.approx(4, rel=0.1)
    assert long.milliseconds / short.milliseconds < 2.6


def test_pytorchs_own_kernel_and_the_models_own_code_have_nothing_to_be_held_against() -> None:
    for spec, lowering in ((_spec(), "sdpa_cudnn"), (_spec(decomposed=True), "hopper")):
        found = evidence.estimate(spec, H200, lowering)
        assert found is not None
        assert (found.other, found.other_milliseconds, found.gained) == (None, None, None)


_PADDING = KeyPadding(
    condition=index_expr.as_bool(index_expr.Load("m", (index_expr.Index("b"), index_expr.Index("k")), "int"))
)


@pytest.mark.parametrize(
    ("spec", "target", "lowering"),
    [
        (_spec(), Target.fake(sm=80), "hopper"),
        (_spec(), H200, "untouched"),
        (_spec(seqlen="s0"), H200, "hopper"),
        (_spec(seqlen=128 * 1024), H200, "hopper"),
        (_spec(seqlen=256), H200, "hopper"),
        (_spec(batch=1, seqlen=512), H200, "hopper"),
        (_spec(mask=MaskSpec(kinds=(_PADDING,), dense=Dense(shape=(2, 1, 1, 8192), dtype="bool"))), H200, "hopper"),
        (_spec(score=ScoreSpec(scale=0.1, dropout_p=0.1)), H200, "hopper"),
    ],
    ids="gpu lowering symbolic longer shorter few padded dropout".split(),
)
def test_what_was_not_measured_has_no_estimate(spec: AttentionSpec, target: Target, lowering: str) -> None:
    assert evidence.estimate(spec, target, lowering) is None
