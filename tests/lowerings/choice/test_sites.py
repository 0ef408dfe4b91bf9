"""Rows by what a site has: biases, dropout, few queries, FlexAttention, the CPU; and packages that would be faster."""

from __future__ import annotations

import csv
import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.choice import evidence, flex, packages, priorities
from attn_compiler.lowerings.choice.priorities import order, row_of
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.passes.writing.select import decide
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Causal, Dense, Flag, MaskSpec
from attn_compiler.spec.target import Target
from benchmarks import select_cases
from tests.cases import CASES, build
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec


# Biases of vision models' lengths.
def of_bias(seqlen: int, *, learned: bool = False, **given: Any) -> Any:
    added = bias(1, 8, seqlen, seqlen, requires_grad=learned)
    sizes: dict[str, Any] = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "head_dim": 64, "mask": MaskSpec()}
    return make_spec(**sizes | {"needs_grad": learned, "changes": (added,)} | given)


@pytest.mark.parametrize(
    ("seqlen", "learned", "first"),
    [
        (49, False, "triton"),
        (144, False, "sdpa_cudnn"),
        (197, False, "triton"),
        (257, True, "cudnn"),
        (577, True, "cudnn"),
        (49, True, "sdpa_cudnn"),
        (1200, True, "hopper"),
    ],
)
def test_by_length(seqlen: int, learned: bool, first: str) -> None:
    assert order(of_bias(seqlen, learned=learned), Target.fake(sm=90))[0] == first


def test_only_what_was_measured_has_these_rows() -> None:
    for spec, sm in (
        (of_bias(197), 80),
        (of_bias(197, head_dim=128), 90),
        (of_bias(197, dtype="float32"), 90),
        (of_bias(577, needs_grad=True), 90),
    ):
        assert row_of(spec, Target.fake(sm=sm)) not in priorities.group("bias")


# Dropout beside a mask.
MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "select_dropout.csv"
#: within which orders are not told apart: a row stands for other sizes, too
NEAR = 1.3


def _times() -> dict[str, dict[str, float]]:
    """Of each case, microseconds of forward and backward by side."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with MEASURED.open() as file:
        for line in csv.DictReader(file):
            found[line["case"]][line["side"]] += float(line["p50_us"])
    return found


@pytest.mark.parametrize("name", sorted(_times()))
@pytest.mark.parametrize("dropout_p", [0.1, 0.125])
def test_the_choice_is_near_the_fastest_that_takes_the_case(name: str, dropout_p: float) -> None:
    case = next(case for case in select_cases.DROPOUT_CASES if case.name == name)
    spec = select_cases.spec_of(case, training=True)
    spec = dataclasses.replace(spec, score=dataclasses.replace(spec.score, dropout_p=dropout_p))
    times = _times()[name]
    # PyTorch's own choice was cuDNN, which takes multiples of 1/16.
    sides = {"triton": times["triton"], "sdpa_efficient": times["sdpa_efficient"]}
    if dropout_p == 0.125 and "table" not in name:
        sides["sdpa_cudnn"] = times["sdpa"]
    chosen = decide(spec, Target.fake(), Options()).lowering
    assert sides[chosen] <= NEAR * min(sides.values())
    found = evidence.evidence(spec, Target.fake())
    assert found is not None
    assert found.measured


def test_every_row_says_where_it_was_measured() -> None:
    assert all(row.measured and "select_dropout.csv" in row.why for row in priorities.group("dropout"))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_scores_and_no_mask_are_left_to_pytorch(head_dim: int, needs_grad: bool) -> None:
    """BERT, XLM-R and T5 as they are configured: cuDNN takes no dropout of 0.1."""
    target = Target.fake()
    sizes: dict[str, Any] = {"seqlen_q": 512, "seqlen_kv": 512, "head_dim": head_dim, "needs_grad": needs_grad}
    assert decide(make_spec(mask=dense(2, 1, 1, 512), dropout_p=0.1, **sizes), target, Options()).lowering == "triton"
    few = make_spec(mask=dense(2, 1, 1, 128), dropout_p=0.1)
    assert decide(few, target, Options()).lowering == "sdpa_efficient"
    assert decide(make_spec(dropout_p=0.1, **sizes), target, Options()).lowering.startswith("sdpa_")


# Attention that leaves most of an H200 idle.
H200 = Target.fake(sm=90)


def spec_of(batch: int, seqlen: int, heads: int, head_dim: int, *, heads_kv: int | None = None, **given: Any) -> Any:
    sizes = {"batch": batch, "heads": heads, "heads_kv": heads_kv or heads, "head_dim": head_dim}
    return make_spec(**sizes | {"seqlen_q": seqlen, "seqlen_kv": seqlen, "needs_grad": False} | given)


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (spec_of(4, 256, 16, 80), "triton"),
        (spec_of(1, 729, 24, 64), "triton"),
        # So little work that the host's time counts.
        (spec_of(1, 197, 12, 64), "sdpa_cudnn"),
        (spec_of(32, 256, 20, 64), "sdpa_cudnn"),
        (spec_of(16, 256, 12, 128), "sdpa_cudnn"),
        (spec_of(4, 256, 12, 128), "triton"),
        (spec_of(1, 4262, 16, 32), "triton"),
        (spec_of(64, 130, 20, 64, needs_grad=True), "triton"),
        (spec_of(64, 197, 12, 64, needs_grad=True), "sdpa_cudnn"),
        (spec_of(32, 230, 16, 72, needs_grad=True), "sdpa_cudnn"),
        (spec_of(8, 172, 8, 256, heads_kv=1, mask=CAUSAL), "triton"),
        (spec_of(4, 526, 24, 128, heads_kv=8, mask=CAUSAL), "hopper"),
        (spec_of(8, 2048, 16, 64, mask=CAUSAL), "sdpa_cudnn"),
        (spec_of(8, 2048, 12, 160, needs_grad=True), "sdpa_cudnn"),
    ],
    ids=str,
)
def test_by_work(spec: Any, first: str) -> None:
    assert order(spec, H200)[0] == first


def test_what_a_row_was_not_measured_for_has_another() -> None:
    for spec, target in (
        (spec_of(4, 256, 16, 80), Target.fake(sm=80)),
        (spec_of(4, 256, 16, 80, dtype="float32"), H200),
        (spec_of(4, 256, 16, 80, dropout_p=0.1), H200),
        (spec_of(4, 1, 16, 80), H200),
        (spec_of(4, 256, 16, "s1", mask=MaskSpec()), H200),  # type: ignore[arg-type]
        # Of an unknown batch it is not known that the work is little.
        (spec_of("s0", 729, 24, 64), H200),  # type: ignore[arg-type]
    ):
        assert row_of(spec, target) not in priorities.group("short")


def _spec(**changes: object) -> AttentionSpec:
    return dataclasses.replace(build(CASES[0]).spec, **changes)  # type: ignore[arg-type]


DENSE = MaskSpec(dense=Dense(shape=(1, 1, 512, 512), dtype="bool", terms=1), reason="it comes in")
PADDING = MaskSpec(dense=Dense(shape=(2, 1, 1, 512), dtype="bool", terms=1), reason="it comes in")


@pytest.mark.parametrize("name", ["sdpa_efficient", "sdpa_cpu_flash", "triton", "decode"])
def test_a_tensor_with_an_element_for_each_score_is_not_made(name: str) -> None:
    spec = _spec(mask=DENSE)
    (reason,) = flex.check_flex_call(spec, name, by_name(name).reads_pairs(spec, H200))
    assert "1 × 1 × 512 × 512" in reason.observed
    assert reason.remedy is not None
    assert name in reason.remedy


@pytest.mark.parametrize("name", ["sdpa_flash", "triton", "cudnn"])
@pytest.mark.parametrize(
    "mask", [MaskSpec(), MaskSpec(kinds=(Causal(),), flag=Flag.CALLED), PADDING], ids=["none", "causal", "padding"]
)
def test_what_needs_none_is_allowed(name: str, mask: MaskSpec) -> None:
    spec = _spec(mask=mask)
    assert not flex.check_flex_call(spec, name, by_name(name).reads_pairs(spec, H200))


@pytest.mark.parametrize("name", ["math", "reference"])
def test_what_writes_the_scores_is_not(name: str) -> None:
    assert flex.check_flex_call(_spec(mask=MaskSpec()), name, reads_pairs=False)


# The CPU's rows of the choice.
def test_every_row_is_the_cpus_and_has_its_evidence() -> None:
    for row in priorities.group("cpu"):
        assert row.sms is None
        assert row.why
        assert row.since.startswith("2026-11-")
        for name in row.order:
            assert by_name(name)


def test_they_decide_for_a_cpu_and_no_other_rows_do() -> None:
    for dtype in ("float32", "bfloat16"):
        spec = make_spec(device="cpu", dtype=dtype)
        row = priorities.row_of(spec, Target.fake(device="cpu"))
        assert row in priorities.group("cpu")
        assert priorities.row_of(spec, Target.fake()) not in priorities.group("cpu")


# What packages that are not installed would gain.
WINDOW = select_cases.spec_of(select_cases.BY_NAME["window_d64_s8192"], training=True)
BOTH = {"flash_attn_4": "4.0.0b36", "cudnn_frontend": "1.23.0"}


def _faster(spec: Any, **machine: str) -> Any:
    target = Target.fake(**machine)
    return select.faster(spec, target, select.decide(spec, target, Options()))


def test_a_site_is_told_what_would_be_faster_and_how_much() -> None:
    found = _faster(WINDOW)
    row = priorities.row_of(WINDOW, Target.fake())
    assert row is not None
    assert (found.lowering, found.install) == ("fa4", "pip install 'flash-attn-4==4.0.0b36'")
    assert found.speed == pytest.approx(row.times["hopper"] / row.times["fa4"])
    assert found.since == row.since
    assert "times as fast" in found.words


@pytest.mark.parametrize(
    ("change", "machine"),
    [({}, BOTH), ({"dtype": "float32"}, {}), ({"has_dropout": True}, {})],
    ids=["it is installed", "not measured in that dtype", "it does not take dropout"],
)
def test_nothing_is_told_where_the_package_would_change_nothing(
    change: dict[str, Any], machine: dict[str, str]
) -> None:
    spec = WINDOW
    if change.get("dtype"):
        spec = dataclasses.replace(
            spec,
            **{name: dataclasses.replace(getattr(spec, name), dtype="float32") for name in "qkv"},
            out_dtype="float32",
        )
    if change.get("has_dropout"):
        spec = dataclasses.replace(spec, score=dataclasses.replace(spec.score, dropout_p=0.1))
    assert _faster(spec, **machine) is None


def test_a_lowering_that_refuses_for_another_reason_is_not_advised() -> None:
    # FlashAttention-4 wants its head dims to be multiples of 8.
    head_dim = 60
    odd = {
        name: dataclasses.replace(getattr(WINDOW, name), shape=(*getattr(WINDOW, name).shape[:3], head_dim))
        for name in "qkv"
    }
    found = _faster(dataclasses.replace(WINDOW, **odd))
    assert found is None or found.lowering != "fa4"


def test_what_has_no_measured_times_has_nothing_faster() -> None:
    for machine in (Target.fake(device="cpu"), Target.fake(sm=80)):
        assert packages.faster(WINDOW, machine, "triton") == []
    assert packages.faster(WINDOW, Target.fake(), "untouched") == []


def test_a_package_stands_for_the_classes_where_it_is_first() -> None:
    flash, cudnn = (packages.standing(package, 90) for package in packages.PACKAGES)
    assert flash is not None
    assert cudnn is not None
    assert 0 < cudnn.first < flash.first < flash.classes == cudnn.classes
    assert 1.03 <= flash.speed < 2
    assert packages.standing(packages.PACKAGES[0], 80) is None


def test_a_version_that_is_advised_is_one_that_the_lowering_takes() -> None:
    from attn_compiler.lowerings import by_name

    for package in packages.PACKAGES:
        assert by_name(package.lowering).unavailable(Target.fake())
        assert not by_name(package.lowering).unavailable(package.installed(Target.fake()))
