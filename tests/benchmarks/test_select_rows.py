"""Rows follow from the measured times, and those that are committed are what the committed times give."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from attn_compiler.lowerings.choice import priorities
from attn_compiler.spec.target import Target
from benchmarks import select_cases, select_rows
from benchmarks.select_rows import Evidence
from tests.lowerings.specs import CAUSAL, make_spec

TARGET = Target.fake(flash_attn_4="4.0.0b36")


def rows(case: str, forward: Mapping[str, float], backward: Mapping[str, float] | None = None) -> list[dict[str, str]]:
    shared = {"case": case, "date": "2026-11-21", "chosen": ""}
    passes = {"forward": forward, "backward": backward or {}}
    return [
        {**shared, "pass": which, "side": side, "p50_us": str(took), "rounds": "9"}
        for which, times in passes.items()
        for side, took in times.items()
    ]


def evidence(**times: float) -> Evidence:
    return Evidence(case="a", band="causal", grouped=False, times=times, date="2026-11-21")


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


def test_what_comes_next_is_best_without_those_before() -> None:
    shapes = [
        evidence(fa4=50.0, cudnn=100.0, triton=101.0),
        evidence(fa4=50.0, cudnn=60.0, triton=65.0),
        evidence(fa4=50.0, cudnn=120.0, triton=100.0),
    ]
    assert [name for name, _ in select_rows.ranked(shapes)] == ["fa4", "triton", "cudnn"]


def test_of_two_that_are_as_fast_the_one_that_is_everywhere_comes_first() -> None:
    close = [evidence(fa4=100.0, cudnn=100.5, sdpa_cudnn=100.9, triton=300.0)]
    assert [name for name, _ in select_rows.ranked(close)] == ["sdpa_cudnn", "fa4", "cudnn", "triton"]
    further = [evidence(fa4=100.0, cudnn=100.5, sdpa_cudnn=102.0)]
    assert [name for name, _ in select_rows.ranked(further)] == ["fa4", "cudnn", "sdpa_cudnn"]


def test_a_band_has_a_row_of_its_own_where_that_changes_the_choice() -> None:
    """Also where it changes it only on machines without the first."""
    plain = {"fa4": 1.0, "cudnn": 2.0, "triton": 3.0}
    window = {"fa4": 1.0, "cudnn": 4.0, "triton": 3.0}
    same = rows("sinks_gqa_d64_s8192", plain) + rows("sinks_window_gqa_d64_s8192", plain)
    assert [line["band"] for line in select_rows.lines(select_rows.evidence(same))] == [""]
    other = rows("sinks_gqa_d64_s8192", plain) + rows("sinks_window_gqa_d64_s8192", window)
    found = [(line["band"], line["order"].split()[:3]) for line in select_rows.lines(select_rows.evidence(other))]
    assert found == [("window", ["fa4", "triton", "cudnn"]), ("", ["fa4", "cudnn", "triton"])]


def test_what_did_not_run_everywhere_is_not_ranked() -> None:
    assert select_rows.ranked([evidence(fa4=1.0, triton=2.0), evidence(triton=2.0)]) == [
        ("triton", pytest.approx(2**0.5))
    ]


def test_training_counts_forward_and_backward() -> None:
    measured = rows("causal_d64_s2048", {"fa4": 90.0, "sdpa_cudnn": 100.0}, {"fa4": 300.0, "sdpa_cudnn": 200.0})
    inference, training = select_rows.lines(select_rows.evidence(measured))
    assert (inference["training"], training["training"]) == ("no", "yes")
    assert inference["order"] == "fa4 sdpa_cudnn sdpa_flash sdpa_efficient hopper triton"
    assert training["order"].split()[0] == "sdpa_cudnn"
    assert (inference["times"], inference["cases"]) == ("fa4 1.00, sdpa_cudnn 1.11", "causal_d64_s2048")
    assert (inference["head_dim_from"], inference["head_dim_to"]) == ("1", "64")
    assert (inference["seqlen_from"], inference["seqlen_to"]) == ("1024", "")


def _timed(
    case: str, forward: Mapping[str, float], backward: Mapping[str, float] | None = None
) -> list[dict[str, str]]:
    """All columns that are read."""
    further = {"p20_us": "90", "p80_us": "110", "tflops": "500"}
    return [{**row, **further} for row in rows(case, forward, backward)]


def test_a_lowering_of_a_later_run_is_tied_to_one_of_both() -> None:
    first = _timed("causal_d64_s2048", {"sdpa_cudnn": 100.0, "triton": 120.0}, {"sdpa_cudnn": 200.0, "triton": 300.0})
    backward = {"triton": 150.0, "hopper": 90.0}
    later = _timed("causal_d64_s2048", {"sdpa_cudnn": 50.0, "triton": 60.0, "hopper": 40.0}, backward)
    found = {(row["side"], row["pass"]): row for row in select_rows.joined(first, later)}
    assert float(found["hopper", "forward"]["p50_us"]) == 80.0
    assert float(found["hopper", "forward"]["tflops"]) == 250.0
    assert float(found["hopper", "backward"]["p50_us"]) == 180.0
    assert float(found["sdpa_cudnn", "forward"]["p50_us"]) == 100.0


def test_a_backward_of_another_family_has_that_ones_time() -> None:
    first = _timed("causal_d256_s2048", {"sdpa_cudnn": 100.0, "triton": 120.0}, {"sdpa_cudnn": 200.0, "triton": 300.0})
    backward = {"triton": 150.0, "hopper": 90.0}
    later = _timed("causal_d256_s2048", {"triton": 60.0, "hopper": 40.0}, backward)
    found = {(row["side"], row["pass"]): row for row in select_rows.joined(first, later)}
    # Of the Triton family's, which it has for wide heads.
    assert float(found["hopper", "backward"]["p50_us"]) == 300.0


def test_a_later_run_without_what_ties_it_adds_nothing() -> None:
    first = _timed("causal_d64_s2048", {"sdpa_cudnn": 100.0}, {"sdpa_cudnn": 200.0})
    assert select_rows.joined(first, _timed("causal_d64_s2048", {"triton": 60.0, "hopper": 40.0})) == first
    far = [{**row, "rounds": "2"} for row in _timed("causal_d64_s2048", {"sdpa_cudnn": 900.0, "hopper": 40.0})]
    assert select_rows.joined(first, far) == first


def test_what_is_slow_in_the_backward_does_not_come_first_in_training() -> None:
    measured = rows(
        "padded_d256_s2048", {"triton": 500.0, "sdpa_cudnn": 1050.0}, {"triton": 3900.0, "sdpa_cudnn": 3400.0}
    )
    inference, training = select_rows.lines(select_rows.evidence(measured))
    assert inference["order"].startswith("triton sdpa_cudnn")
    assert training["order"].startswith("sdpa_cudnn triton")


def test_a_start_among_two_rounds_does_not_count() -> None:
    measured = rows("causal_d64_s8192", {"fa4": 100.0, "sdpa_cudnn": 300.0, "sdpa_flash": 200.0})
    measured[1] |= {"rounds": "2", "p20_us": "150.0"}
    (line,) = select_rows.lines(select_rows.evidence(measured))
    assert line["order"].split()[:3] == ["fa4", "sdpa_cudnn", "sdpa_flash"]


def test_some_lengths_are_held_out() -> None:
    assert select_rows.lines(select_rows.evidence(rows("causal_d64_s4096", {"fa4": 9.0}))) == []


def test_peers_that_are_no_lowerings_are_not_ranked() -> None:
    (line,) = select_rows.lines(select_rows.evidence(rows("causal_d64_s8192", {"fa4": 9.0, "sdpa": 1.0, "flex": 1.0})))
    assert line["order"].split()[0] == "fa4"


def test_a_measured_length_stands_for_those_up_to_the_next_one() -> None:
    names = ("causal_d64_s512", "causal_d64_s2048", "causal_gqa_d64_s8192", "full_d64_s512", "causal_d128_s32768")
    found = select_rows.lines(select_rows.evidence([row for name in names for row in rows(name, {"fa4": 9.0})]))
    bounds = [(line["mask"], line["head_dim_to"], line["seqlen_from"], line["seqlen_to"]) for line in found]
    assert bounds == [
        ("causal", "64", "512", "1535"),
        ("causal", "64", "1536", "4095"),
        ("causal", "64", "4096", ""),
        ("causal", "128", "16384", ""),
        ("full", "64", "512", "1023"),
    ]


def test_rows_for_short_lengths_want_a_large_q(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = read_back(rows("causal_d64_s512", {"fa4": 9.0}), tmp_path, monkeypatch)
    for batch, fits in ((32, True), (8, True), (7, False), ("s0", False)):
        spec = make_spec(mask=CAUSAL, batch=batch, heads=32, seqlen_q=512, seqlen_kv=512, needs_grad=False)  # type: ignore[arg-type]
        assert row.fits(spec, TARGET) == fits


def test_fewer_heads_have_a_row_of_their_own_where_that_changes_the_choice() -> None:
    plain = rows("causal_d64_s8192", {"fa4": 1.0, "sdpa_cudnn": 2.0})
    same = rows("causal_gqa_d64_s8192", {"fa4": 1.0, "sdpa_cudnn": 1.5})
    other = rows("causal_gqa_d64_s8192", {"fa4": 2.0, "sdpa_cudnn": 1.0})
    assert [line["grouped"] for line in select_rows.lines(select_rows.evidence(plain + same))] == [""]
    found = select_rows.lines(select_rows.evidence(plain + other))
    assert [(line["grouped"], line["order"].split()[0]) for line in found] == [("no", "fa4"), ("yes", "sdpa_cudnn")]


def read_back(
    measured: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[priorities.Row, ...]:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, priorities.COLUMNS)
        writer.writeheader()
        writer.writerows(select_rows.lines(select_rows.evidence(measured)))
    monkeypatch.setattr(priorities, "MEASURED", path)
    return priorities._read()


def test_a_row_is_read_back_as_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"triton": 1.0, "fa4": 2.0}
    measured = rows("window_d128_s2048", times) + rows("causal_d128_s32768", times, times)
    found = read_back(measured, tmp_path, monkeypatch)
    window, causal, training = sorted(found, key=lambda row: (row.mask == "causal", row.training is True))
    assert (window.seqlens, causal.seqlens) == ((1024, None), (16384, None))
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


def test_replaying_puts_today_s_choice_into_the_measured_shapes() -> None:
    times = {"sdpa_cudnn": 10.0, "sdpa_flash": 5.0}
    measured = rows("causal_d64_s512", times)
    measured[1]["chosen"] = "yes"
    where = {"cudnn": "91900", "torch": "2.11.0+cu130", "triton": "3.6.0", "flash_attn_4": "", "cudnn_frontend": ""}
    (shape,) = select_rows.replayed([row | where for row in measured])
    assert (shape.chosen, shape.best) == ("sdpa_cudnn", "sdpa_flash")
