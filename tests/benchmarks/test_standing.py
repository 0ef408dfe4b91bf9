from __future__ import annotations

import pytest

from benchmarks import standing


def rows(case: str, which: str, chosen: str, **times: float) -> list[dict[str, str]]:
    return [
        {"case": case, "pass": which, "side": side, "chosen": "yes" if side == chosen else "", "p50_us": str(took)}
        for side, took in times.items()
    ]


def test_best_and_regret() -> None:
    (shape,) = standing.of(rows("a", "forward", "fa4", fa4=103.0, sdpa_cudnn=100.0, sdpa=150.0, presented=50.0))
    assert (shape.best, shape.regret) == ("sdpa_cudnn", pytest.approx(1.03))
    assert shape.ratio("sdpa") == pytest.approx(150 / 103)
    assert shape.ratio("flex") is None


def test_the_choice_is_the_best_where_another_is_as_fast() -> None:
    (shape,) = standing.of(rows("a", "forward", "fa4", sdpa_cudnn=100.0, fa4=100.0))
    assert (shape.best, shape.regret) == ("fa4", 1.0)


def test_shapes_without_a_measured_choice_are_left_out() -> None:
    failed = rows("a", "forward", "fa4", fa4=1.0, sdpa=1.0)
    failed[0] |= {"p50_us": "", "failure": "RuntimeError"}
    assert standing.of(failed) == []
    assert standing.summary([]) == "nothing was measured"


def test_summary() -> None:
    measured = [
        *rows("a", "forward", "fa4", fa4=100.0, sdpa=200.0, presented=400.0),
        *rows("a", "backward", "fa4", fa4=100.0, sdpa=50.0),
        *rows("b", "forward", "triton", triton=102.0, fa4=100.0, sdpa=102.0),
    ]
    said = standing.summary(standing.of(measured))
    assert "3 shapes, 2 of them" in said
    assert "within 3% of the best side: 66.7%; more than 10% slower: 1" in said
    assert "worst: a backward, fa4 takes 2.000 times sdpa" in said
    assert "sdpa over ours, geometric mean of 3: 1.000" in said
    assert "presented over ours, geometric mean of 1: 4.000" in said
