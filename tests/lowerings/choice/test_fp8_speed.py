from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.base import FP8
from attn_compiler.lowerings.choice import fp8_speed
from attn_compiler.lowerings.choice.measured import Table
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Causal, Dense, KeyBound, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import ScoreChange, Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.choice.measured import rows_from
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, make_spec

H200 = Target.fake(sm=90)
LINES = """\
lowering,mask,head_dim_from,head_dim_to,seqlen,keys,grouped,training,scaling,backward,tflops,since,case
hopper_fp8,causal,65,128,1024,512.5,no,no,block,no,300,2026-11-21,causal_d128_s1024
sdpa_cudnn,causal,65,128,1024,512.5,no,no,,,430,2026-11-21,causal_d128_s1024
hopper_fp8,causal,65,128,8192,4096.5,no,no,block,no,740,2026-11-21,causal_d128_s8192
hopper_fp8,causal,65,128,8192,4096.5,no,no,before,no,780,2026-11-21,causal_d128_s8192
sdpa_cudnn,causal,65,128,8192,4096.5,no,no,,,608,2026-11-21,causal_d128_s8192
fa4,causal,65,128,8192,4096.5,no,no,,,760,2026-11-21,causal_d128_s8192
hopper_fp8,causal,65,128,1024,512.5,yes,no,block,no,450,2026-11-21,causal_d128_s1024_g4
hopper_fp8,causal,65,128,8192,4096.5,no,yes,block,no,500,2026-11-21,causal_d128_s8192
cudnn_fp8,causal,65,128,8192,4096.5,no,yes,tensor,no,505,2026-11-21,causal_d128_s8192
cudnn_fp8,causal,65,128,8192,4096.5,no,yes,tensor,yes,588,2026-11-21,causal_d128_s8192
sdpa_cudnn,causal,65,128,8192,4096.5,no,yes,,,508,2026-11-21,causal_d128_s8192
"""


@pytest.fixture(autouse=True)
def measured(tmp_path: Path) -> Any:
    with rows_from(fp8_speed, LINES, tmp_path):
        yield


def asked(seqlen: int, **given: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"mask": CAUSAL, "head_dim": 128, "needs_grad": False} | given
    spec = make_spec(seqlen_q=seqlen, seqlen_kv=seqlen, **sizes)
    return dataclasses.replace(spec, fp8=Fp8Recipe())


def test_it_is_refused_where_it_was_slower_with_both_speeds() -> None:
    (reason,) = fp8_speed.check_fp8_speed(asked(1200), H200, "hopper_fp8", "sdpa_cudnn")
    assert "300 TFLOP/s" in reason.observed
    assert "430" in reason.observed
    assert reason.remedy is not None
    assert "force" in reason.remedy
    assert fp8_speed.check_fp8_speed(asked(6000), H200, "hopper_fp8", "sdpa_cudnn") == []


def test_it_is_held_against_what_the_site_would_get() -> None:
    assert fp8_speed.check_fp8_speed(asked(8192), H200, "hopper_fp8", "fa4") != []
    assert fp8_speed.check_fp8_speed(asked(8192), H200, "hopper_fp8", "triton") == []


@pytest.mark.parametrize(
    "spec", [asked(1200, mask=MaskSpec()), asked(1200, head_dim=64)], ids=["another mask", "another head dim"]
)
def test_what_was_not_measured_is_not_refused(spec: AttentionSpec) -> None:
    assert fp8_speed.check_fp8_speed(spec, H200, "hopper_fp8", "sdpa_cudnn") == []


def test_one_that_was_not_measured_is_no_faster_than_those_that_were() -> None:
    (reason,) = fp8_speed.check_fp8_speed(asked(1200), H200, "reference_fp8", "sdpa_cudnn")
    assert "hopper_fp8 with rounding 300" in reason.observed


def test_fewer_heads_of_keys_and_values_count_for_those_that_have_them() -> None:
    assert fp8_speed.check_fp8_speed(asked(1200), H200, "hopper_fp8", "sdpa_cudnn") != []
    assert fp8_speed.check_fp8_speed(asked(1200, heads_kv=2), H200, "hopper_fp8", "sdpa_cudnn") == []
    far = fp8_speed.estimate("hopper_fp8", asked(6000, heads_kv=2))
    assert far is not None
    assert (far.seqlen, far.grouped) == (8192, False)


def test_a_backward_in_fp8_has_speeds_of_its_own() -> None:
    training = asked(8192, needs_grad=True)
    assert fp8_speed.check_fp8_speed(training, H200, "cudnn_fp8", "sdpa_cudnn") != []
    both = dataclasses.replace(training, fp8=Fp8Recipe(backward=True))
    assert fp8_speed.check_fp8_speed(both, H200, "cudnn_fp8", "sdpa_cudnn") == []


def test_each_way_to_find_scales_has_speeds_of_its_own() -> None:
    spec = asked(8192)
    delayed = dataclasses.replace(spec, fp8=Fp8Recipe(scaling=DelayedScaling()))
    assert fp8_speed.check_fp8_speed(spec, H200, "hopper_fp8", "fa4") != []
    assert fp8_speed.check_fp8_speed(delayed, H200, "hopper_fp8", "fa4") == []
    of_a_head = dataclasses.replace(spec, fp8=Fp8Recipe(scaling=CurrentScaling(granularity="head")))
    nearest = fp8_speed.estimate("hopper_fp8", of_a_head)
    assert nearest is not None
    assert nearest.seqlen == 8192


def test_a_rotation_has_a_speed_of_its_own() -> None:
    fp8_speed.TABLE.path.write_text(
        LINES + "hopper_fp8,causal,65,128,8192,4096.5,no,no,accurate,no,600,2026-11-22,causal_d128_s8192\n"
    )
    plain = asked(8192)
    assert fp8_speed.check_fp8_speed(plain, H200, "hopper_fp8", "sdpa_cudnn") == []
    for changed in (Fp8Recipe(hadamard=True), Fp8Recipe(smooth_k=True)):
        (reason,) = fp8_speed.check_fp8_speed(dataclasses.replace(plain, fp8=changed), H200, "hopper_fp8", "sdpa_cudnn")
        assert "with rounding 600" in reason.observed


def test_the_nearest_length_counts_before_the_way_to_find_scales() -> None:
    """Delayed scaling was measured at 8192 alone, where it pays."""
    delayed = dataclasses.replace(asked(1200), fp8=Fp8Recipe(scaling=DelayedScaling()))
    (reason,) = fp8_speed.check_fp8_speed(delayed, H200, "hopper_fp8", "sdpa_cudnn")
    assert "300 TFLOP/s (S 1024)" in reason.observed


def test_both_speeds_are_of_one_length() -> None:
    its = fp8_speed.estimate("sdpa_cudnn", asked(1200), fp8_speed.estimate("hopper_fp8", asked(8192)))
    assert its is not None
    assert its.seqlen == 8192


@pytest.mark.parametrize(("seqlen", "refused"), [(4096, False), (4000, True), (64, True)])
def test_far_below_what_was_measured_is_refused(seqlen: int, refused: bool) -> None:
    training = dataclasses.replace(asked(seqlen, needs_grad=True), fp8=Fp8Recipe(backward=True))
    reasons = fp8_speed.check_fp8_speed(training, H200, "cudnn_fp8", "sdpa_cudnn")
    assert bool(reasons) == refused
    assert all(f"S {seqlen}" in reason.observed for reason in reasons)


WINDOWS = """\
hopper_fp8,window,65,128,8192,3072.3,no,no,block,no,700,2026-11-22,window_d128_s8192_w4096
cudnn,window,65,128,8192,3072.3,no,no,,,550,2026-11-22,window_d128_s8192_w4096
hopper_fp8,window,65,128,8192,960.1,no,no,block,no,450,2026-11-22,window_d128_s8192_w1024
cudnn,window,65,128,8192,960.1,no,no,,,480,2026-11-22,window_d128_s8192_w1024
hopper_fp8,window,65,128,16384,992.0,no,no,block,no,470,2026-11-22,window_d128_s16384_w1024
"""


def windowed(seqlen: int, window: int, **given: Any) -> AttentionSpec:
    dense = Dense(shape=(1, 1, seqlen, seqlen), dtype="bool")
    mask = MaskSpec(kinds=(Causal(), SlidingWindow(left=window - 1, right=None)), dense=dense)
    return asked(seqlen, mask=mask, **given)


@pytest.mark.parametrize(
    "changes", [(), (Softcap(cap=30.0),), (Sinks(requires_grad=False),)], ids=["plain", "softcap", "sinks"]
)
def test_windows_go_by_the_keys_of_a_query(changes: tuple[ScoreChange, ...]) -> None:
    fp8_speed.TABLE.path.write_text(LINES + WINDOWS)
    for seqlen, window in ((8192, 4096), (32768, 3000), (32768, 8192)):
        assert fp8_speed.check_fp8_speed(windowed(seqlen, window, changes=changes), H200, "hopper_fp8", "cudnn") == []
    for seqlen, window in ((8192, 1024), (32768, 1024), (2048, 4096)):
        (reason,) = fp8_speed.check_fp8_speed(windowed(seqlen, window, changes=changes), H200, "hopper_fp8", "cudnn")
        assert "960 keys a query" in reason.observed
    (short,) = fp8_speed.check_fp8_speed(windowed(8192, 128, changes=changes), H200, "hopper_fp8", "cudnn")
    assert "127 keys a query" in short.observed


def test_of_rows_with_as_many_keys_the_nearest_length_counts() -> None:
    fp8_speed.TABLE.path.write_text(LINES + WINDOWS.replace("960.1", "992.0"))
    for seqlen in (8192, 16384):
        row = fp8_speed.estimate("hopper_fp8", windowed(seqlen, 1024))
        assert row is not None
        assert row.seqlen == seqlen


def test_batch_rows_with_numbers_of_keys_go_by_their_band() -> None:
    own = KeyBound(side="last", bound=Load("lengths", (Index("b"),), "int"))
    mask = MaskSpec(kinds=(Causal(), own), dense=Dense(shape=(2, 1, 1200, 1200), dtype="bool"))
    (reason,) = fp8_speed.check_fp8_speed(asked(1200, mask=mask), H200, "hopper_fp8", "sdpa_cudnn")
    assert "300 TFLOP/s" in reason.observed


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        (asked(100), 50.5),
        (asked(100, mask=MaskSpec()), 100),
        (windowed(100, 10), (55 + 90 * 10) / 100),
        (windowed(100, 1000), 50.5),
        (make_spec(seqlen_q=2, seqlen_kv=10, mask=BOTTOM_RIGHT), 9.5),
        (make_spec(seqlen_q="s0", seqlen_kv=10, mask=CAUSAL), None),
    ],
    ids=["causal", "full", "window", "long window", "from the end", "unknown"],
)
def test_keys_of_a_query(spec: AttentionSpec, keys: float | None) -> None:
    sizes = fp8_speed.sizes_of(spec)
    assert (None if sizes is None else sizes[0]) == keys


@pytest.mark.parametrize("limit", [0, 1, 7, 40])
@pytest.mark.parametrize(("first", "count"), [(-9, 4), (-3, 20), (0, 0), (0, 12), (5, 3), (30, 30), (50, 2)])
def test_sums_of_clipped_numbers(first: int, count: int, limit: int) -> None:
    numbers = range(first, first + count)
    assert fp8_speed._clipped(first, count, limit) == sum(min(max(number, 0), limit) for number in numbers)


def test_other_machines_were_not_measured() -> None:
    assert fp8_speed.check_fp8_speed(asked(1200), Target.fake(sm=100), "hopper_fp8", "sdpa_cudnn") == []


def test_the_choice_goes_by_it_unless_it_is_forced() -> None:
    slow = asked(1200)
    decision = select.decide(slow, H200, Options())
    assert "hopper_fp8" in [refusal.lowering for refusal in decision.refusals]
    forced = dataclasses.replace(slow, fp8=Fp8Recipe(force=True))
    assert select.decide(forced, H200, Options()).lowering == "hopper_fp8"
    assert select.decide(slow, H200, Options(lowering="hopper_fp8")).lowering == "hopper_fp8"
    assert select.decide(asked(8192), H200, Options()).lowering == "hopper_fp8"


def test_what_the_site_gets_without_fp8_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[AttentionSpec] = []
    decide = select.decide
    monkeypatch.setattr(select, "decide", lambda spec, *rest: (decided.append(spec), decide(spec, *rest))[1])
    refused = {refusal.lowering for refusal in select.decide(asked(1200), H200, Options()).refusals}
    assert "hopper_fp8" in refused
    assert [spec.fp8 is None for spec in decided] == [False, True]


def test_names_of_the_file_are_lowerings() -> None:
    known = set(FP8) | {"sdpa_cudnn", "triton", "fa4", "cudnn", "hopper"}
    assert {row.lowering for row in Table("fp8_sm90.csv", fp8_speed.SpeedRow).rows()} <= known
