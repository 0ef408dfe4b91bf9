"""Rows follow from the measured times, and those that are committed are what the committed times give."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from attn_compiler.lowerings import priorities
from attn_compiler.target import Target
from benchmarks import select_cases, select_rows
from benchmarks.select_rows import Evidence

TARGET = Target.fake(flash_attn_4="4.0.0b36")


def rows(case: str, forward: Mapping[str, float], backward: Mapping[str, float] | None = None) -> list[dict[str, str]]:
    shared = {"case": case, "date": "2026-11-21", "chosen": ""}
    passes = {"forward": forward, "backward": backward or {}}
    return [
        {**shared, "pass": which, "side": side, "p50_us": str(took)}
        for which, times in passes.items()
        for side, took in times.items()
    ]


def evidence(**times: float) -> Evidence:
    return Evidence(case="a", grouped=False, times=times, date="2026-11-21")


def test_the_committed_rows_are_what_the_committed_times_give() -> None:
    with priorities.MEASURED.open(newline="") as file:
        committed = list(csv.DictReader(file))
    assert committed == select_rows.all_lines()


def test_no_times_give_no_rows(tmp_path: Path) -> None:
    assert select_rows.read(tmp_path / "none.csv") == []
    assert select_rows.lines(select_rows.evidence([])) == []


def test_order_is_that_of_the_geometric_means() -> None:
    found = select_rows.ranked(
        [evidence(fa4=100.0, sdpa_cudnn=110.0, triton=400.0), evidence(fa4=105.0, sdpa_cudnn=100.0, triton=100.0)]
    )
    assert [name for name, _ in found] == ["fa4", "sdpa_cudnn", "triton"]
    assert found[2][1] == pytest.approx(2.0)


def test_what_is_slow_somewhere_does_not_come_first() -> None:
    """fa4 is faster on average, and half as fast on one shape."""
    shapes = [
        evidence(fa4=60.0, sdpa_cudnn=62.0),
        evidence(fa4=10.0, sdpa_cudnn=10.5),
        evidence(fa4=115.0, sdpa_cudnn=100.0),
    ]
    assert [name for name, _ in select_rows.ranked(shapes)] == ["sdpa_cudnn", "fa4"]
    everywhere = [evidence(fa4=50.0, sdpa_cudnn=100.0), evidence(fa4=150.0, sdpa_cudnn=100.0)]
    assert select_rows.ranked(everywhere)[0][0] == "fa4"


def test_what_did_not_run_everywhere_is_not_ranked() -> None:
    assert select_rows.ranked([evidence(fa4=1.0, triton=2.0), evidence(triton=2.0)]) == [
        ("triton", pytest.approx(2**0.5))
    ]


def test_training_counts_forward_and_backward() -> None:
    measured = rows("causal_d64_s2048", {"fa4": 90.0, "sdpa_cudnn": 100.0}, {"fa4": 300.0, "sdpa_cudnn": 200.0})
    inference, training = select_rows.lines(select_rows.evidence(measured))
    assert (inference["training"], training["training"]) == ("no", "yes")
    assert inference["order"] == "fa4 sdpa_cudnn sdpa_flash sdpa_efficient triton"
    assert training["order"].split()[0] == "sdpa_cudnn"
    assert inference["why"] == "times the fastest: fa4 1.00, sdpa_cudnn 1.11 (causal_d64_s2048)"
    assert (inference["head_dim_from"], inference["head_dim_to"]) == ("1", "64")
    assert (inference["seqlen_from"], inference["seqlen_to"]) == ("1024", "4095")


def test_what_is_slow_in_the_backward_does_not_come_first_in_training() -> None:
    measured = rows(
        "padded_d256_s2048", {"triton": 500.0, "sdpa_cudnn": 1050.0}, {"triton": 3900.0, "sdpa_cudnn": 3400.0}
    )
    inference, training = select_rows.lines(select_rows.evidence(measured))
    assert inference["order"].startswith("triton sdpa_cudnn")
    assert training["order"].startswith("sdpa_cudnn triton")


def test_some_lengths_are_held_out() -> None:
    assert select_rows.lines(select_rows.evidence(rows("causal_d64_s4096", {"fa4": 9.0}))) == []


def test_peers_that_are_no_lowerings_are_not_ranked() -> None:
    (line,) = select_rows.lines(select_rows.evidence(rows("causal_d64_s8192", {"fa4": 9.0, "sdpa": 1.0, "flex": 1.0})))
    assert line["order"].split()[0] == "fa4"


def test_short_lengths_have_no_rows() -> None:
    assert select_rows.lines(select_rows.evidence(rows("causal_d64_s512", {"fa4": 9.0}))) == []


def test_fewer_heads_have_a_row_of_their_own_where_that_changes_the_choice() -> None:
    plain = rows("causal_d64_s8192", {"fa4": 1.0, "sdpa_cudnn": 2.0})
    same = rows("causal_gqa_d64_s8192", {"fa4": 1.0, "sdpa_cudnn": 1.5})
    other = rows("causal_gqa_d64_s8192", {"fa4": 2.0, "sdpa_cudnn": 1.0})
    assert [line["grouped"] for line in select_rows.lines(select_rows.evidence(plain + same))] == [""]
    found = select_rows.lines(select_rows.evidence(plain + other))
    assert [(line["grouped"], line["order"].split()[0]) for line in found] == [("no", "fa4"), ("yes", "sdpa_cudnn")]


def test_a_row_is_read_back_as_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"triton": 1.0, "fa4": 2.0}
    measured = rows("window_d128_s2048", times) + rows("causal_d128_s32768", times, times)
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, priorities.COLUMNS)
        writer.writeheader()
        writer.writerows(select_rows.lines(select_rows.evidence(measured)))
    monkeypatch.setattr(priorities, "MEASURED", path)
    window, causal, training = sorted(priorities._read(), key=lambda row: (row.mask == "causal", row.training is True))
    assert (window.seqlens, causal.seqlens) == ((1024, 4095), (4096, None))
    for row, name, grad in (
        (window, "window_d128_s2048", False),
        (causal, "causal_d128_s32768", False),
        (training, "causal_d128_s32768", True),
    ):
        spec = select_cases.spec_of(select_cases.BY_NAME[name], training=grad)
        assert row.fits(spec, TARGET)
        assert not row.fits(select_cases.spec_of(select_cases.BY_NAME[name], training=not grad), TARGET)
        assert not row.fits(spec, Target.fake(sm=100))
        assert not row.fits(spec, Target.fake(cudnn=91500))
        for another in ("causal_d256_s32768", "causal_d128_s2048", "full_d128_s8192"):
            assert not row.fits(select_cases.spec_of(select_cases.BY_NAME[another], training=grad), TARGET)


def test_peers_fill_in_shapes_that_were_not_measured_otherwise() -> None:
    measured, peers = (
        rows("causal_d64_s2048", {"fa4": 1.0}),
        rows("causal_d64_s2048", {"fa4": 9.0}) + rows("a", {"fa4": 2.0}),
    )
    assert [(row["case"], row["p50_us"]) for row in select_rows.with_peers(measured, peers)] == [
        ("causal_d64_s2048", "1.0"),
        ("a", "2.0"),
    ]


def run_of(lowering: str, forward: float, backward: float, case: str = "causal, window of 1024 keys") -> dict[str, str]:
    sizes = {"batch": "1", "heads_q": "16", "heads_kv": "16", "seqlen": "8192", "head_dim": "128", "case": case}
    return sizes | {"lowering": lowering, "forward_us_p50": str(forward), "backward_us_p50": str(backward)}


def test_what_ran_beside_others_is_placed_by_its_time_relative_to_theirs() -> None:
    found = select_rows.beside([run_of("cudnn", 80.0, 300.0), run_of("triton", 100.0, 400.0)])
    assert [(one.key.mask, one.key.training, one.other, one.ratio) for one in found] == [
        ("window", False, "triton", 0.8),
        ("window", True, "triton", 0.76),
    ]
    times = {"fa4": 100.0, "triton": 200.0, "sdpa_cudnn": 1000.0}
    inference, training = select_rows.lines(select_rows.evidence(rows("window_d128_s8192", times, times)), found)
    assert inference["order"].split()[:4] == ["fa4", "cudnn", "triton", "sdpa_cudnn"]
    assert "cudnn 1.60" in inference["why"]
    assert training["order"].split()[:3] == ["fa4", "cudnn", "triton"]


def test_what_was_only_beside_others_never_comes_first_and_not_for_noise() -> None:
    faster = select_rows.beside([run_of("cudnn", 10.0, 10.0), run_of("triton", 100.0, 400.0)])
    same = select_rows.beside([run_of("cudnn", 99.0, 399.0), run_of("triton", 100.0, 400.0)])
    order = [("fa4", 1.0), ("triton", 1.5), ("sdpa_cudnn", 3.0)]
    assert [name for name, _ in select_rows.placed(order, faster[:1])] == ["fa4", "cudnn", "triton", "sdpa_cudnn"]
    assert [name for name, _ in select_rows.placed(order, same[:1])] == ["fa4", "triton", "cudnn", "sdpa_cudnn"]
    assert select_rows.placed([("fa4", 1.0)], faster[:1]) == [("fa4", 1.0)]
    assert select_rows.placed([("cudnn", 1.0), ("triton", 2.0)], faster[:1])[0] == ("cudnn", 1.0)


def test_runs_of_other_things_say_nothing() -> None:
    assert select_rows.beside([run_of("cudnn", 1.0, 1.0)]) == []
    others = [run_of(name, 1.0, 1.0, "causal, dropout 1/8") for name in ("cudnn", "triton")]
    assert (
        select_rows.beside(
            [*others, run_of("cudnn", 1.0, 1.0, "full"), run_of("sdpa_cudnn with a mask", 1.0, 1.0, "full")]
        )
        == []
    )


def test_replaying_puts_today_s_choice_into_the_measured_shapes() -> None:
    times = {"sdpa_cudnn": 10.0, "sdpa_flash": 5.0}
    measured = rows("causal_d64_s512", times)
    measured[1]["chosen"] = "yes"
    where = {"cudnn": "91900", "torch": "2.11.0+cu130", "triton": "3.6.0", "flash_attn_4": "", "cudnn_frontend": ""}
    (shape,) = select_rows.replayed([row | where for row in measured])
    assert (shape.chosen, shape.best) == ("sdpa_cudnn", "sdpa_flash")
