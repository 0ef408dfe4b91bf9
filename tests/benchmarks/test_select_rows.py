"""Rows of choice are made of what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.choice import priorities, shape_class
from attn_compiler.spec.target import Target
from benchmarks import bench_select, harness, kernel_cases, kernel_peers, kernel_timing, select_cases, select_rows
from benchmarks.kernel_cases import Case, Problem
from benchmarks.kernel_peers import Side
from benchmarks.select_cases import BY_NAME, CASES, DROPOUT, DROPOUT_CASES, spec_of
from benchmarks.select_rows import Evidence
from tests.lowerings.fa4.stand_in import StandIn, flash  # noqa: F401 - a fixture
from tests.lowerings.specs import CAUSAL, make_spec

# Rows follow from the measured times, and those that are committed are what the committed times give.
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
    assert harness.read(priorities.MEASURED) == select_rows.all_lines()


def test_no_times_give_no_rows(tmp_path: Path) -> None:
    assert select_rows.read(tmp_path / "none.csv") == []
    assert select_rows.lines(select_rows.evidence([])) == []


@pytest.mark.parametrize(
    ("order", "shapes"),
    [
        # by geometric means
        ("fa4 sdpa_cudnn triton", [{"fa4": 100, "sdpa_cudnn": 110, "triton": 400}, {"fa4": 105, "sdpa_cudnn": 100, "triton": 100}]),
        # fa4 is faster on average, and half as fast on one shape; where each is slow somewhere, means decide
        ("sdpa_cudnn fa4", [{"fa4": 60, "sdpa_cudnn": 62}, {"fa4": 10, "sdpa_cudnn": 10.5}, {"fa4": 115, "sdpa_cudnn": 100}]),
        ("fa4 sdpa_cudnn", [{"fa4": 50, "sdpa_cudnn": 100}, {"fa4": 150, "sdpa_cudnn": 100}]),
        # what comes next is best without those before
        (
            "fa4 triton cudnn",
            [{"fa4": 50, "cudnn": a, "triton": b} for a, b in ((100, 101), (60, 65), (120, 100))],
        ),
        # of two that are as fast, the one that is everywhere
        ("sdpa_cudnn fa4 cudnn triton", [{"fa4": 100, "cudnn": 100.5, "sdpa_cudnn": 100.9, "triton": 300}]),
        ("fa4 cudnn sdpa_cudnn", [{"fa4": 100, "cudnn": 100.5, "sdpa_cudnn": 102}]),
        # what did not run everywhere is not ranked
        ("triton", [{"fa4": 1, "triton": 2}, {"triton": 2}]),
    ],
)  # fmt: skip
def test_order(order: str, shapes: list[dict[str, float]]) -> None:
    found = select_rows.ranked([evidence(**times) for times in shapes])
    assert [name for name, _ in found] == order.split()
    means = {"fa4 sdpa_cudnn triton": 2.0, "triton": 2**0.5}
    if order in means:
        assert found[-1][1] == pytest.approx(means[order])


def test_a_band_has_a_row_of_its_own_where_that_changes_the_choice() -> None:
    """Also where it changes it only on machines without the first."""
    plain = {"fa4": 1.0, "cudnn": 2.0, "triton": 3.0}
    window = {"fa4": 1.0, "cudnn": 4.0, "triton": 3.0}
    same = rows("sinks_gqa_d64_s8192", plain) + rows("sinks_window_gqa_d64_s8192", plain)
    assert [line["band"] for line in select_rows.lines(select_rows.evidence(same))] == [""]
    other = rows("sinks_gqa_d64_s8192", plain) + rows("sinks_window_gqa_d64_s8192", window)
    found = [(line["band"], line["order"].split()[:3]) for line in select_rows.lines(select_rows.evidence(other))]
    assert found == [("window", ["fa4", "triton", "cudnn"]), ("", ["fa4", "cudnn", "triton"])]


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


def test_held_out_lengths_and_peers_are_not_ranked() -> None:
    assert select_rows.lines(select_rows.evidence(rows("causal_d64_s4096", {"fa4": 9.0}))) == []
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


def test_rows_for_short_lengths_want_a_large_q(tmp_path: Path) -> None:
    (row,) = read_back(rows("causal_d64_s512", {"fa4": 9.0}), tmp_path)
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


def read_back(measured: list[dict[str, str]], tmp_path: Path) -> tuple[priorities.Row, ...]:
    path = tmp_path / "rows.csv"
    harness.write(path, priorities.COLUMNS, select_rows.lines(select_rows.evidence(measured)))
    return tuple(map(priorities._measured, harness.read(path)))


def test_a_row_is_read_back_as_it_was_meant(tmp_path: Path) -> None:
    times = {"triton": 1.0, "fa4": 2.0}
    measured = rows("window_d128_s2048", times) + rows("causal_d128_s32768", times, times)
    found = read_back(measured, tmp_path)
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


# Sides are the lowerings that take a shape and the peers, one of them chosen (Triton in its interpreter).
KINDS = ["causal_d64_s8192", "causal_gqa_d64_s8192", "full_d64_s2048", "window_d64_s2048", "padded_d64_s2048"]


def small(name: str) -> Case:
    return select_cases.BY_NAME[name].small


def problem_of(name: str, *, training: bool = True) -> Problem:
    return kernel_cases.build(small(name), device="cpu", dtype=torch.float32, training=training)


def outcome(side: Side, problem: Problem) -> list[Tensor]:
    out = side.call()
    used = kernel_cases.used_queries(problem.case)
    grads = torch.autograd.grad(out, side.leaves[:3], kernel_timing.gradient_of_out(problem))
    return [out.detach().where(used, 0.0), *grads]


@pytest.mark.parametrize("name", KINDS)
def test_sides_compute_the_same(name: str) -> None:
    problem = problem_of(name)
    expected = outcome(bench_select.sdpa(problem), problem)
    for make in (bench_select.presented, bench_select.lowering("triton"), bench_select.lowering("reference")):
        for mine, right in zip(outcome(make(problem), problem), expected, strict=True):
            assert torch.allclose(mine, right, atol=2e-5)


@pytest.mark.parametrize("name", ["sinks_window_gqa_d64_s2048", "softcap_d64_s2048"])
def test_what_sdpa_has_no_argument_for_is_no_side_of_it(name: str) -> None:
    problem = problem_of(name)
    for make in (bench_select.sdpa, bench_select.presented):
        with pytest.raises(ValueError, match="neither softcap nor sinks"):
            make(problem)
    side = bench_select.lowering("triton")(problem)
    assert len(side.leaves) == 3 + ("sinks" in name)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(side.call().sum(), side.leaves))


def test_the_lowerings_of_a_machine_and_its_choice(monkeypatch: pytest.MonkeyPatch, flash: StandIn) -> None:  # noqa: F811
    machine = Target.fake(flash_attn_4="4.0.0b36")
    monkeypatch.setattr(Target, "current", lambda device: machine)
    for name in ("causal_d64_s512", "padded_d64_s2048", "softcap_d64_s8192"):
        case = select_cases.BY_NAME[name]
        spec = select_cases.spec_of(case, training=False)
        problem = dataclasses.replace(problem_of(name), spec=spec, case=case)
        makes, chosen = bench_select.sides_of(problem, ["sdpa", "flex"])
        assert "triton" in makes
        assert ("fa4" in makes) == (case.padding is None)
        assert ("sdpa_cudnn" in makes) == (case.softcap is None)
        assert ("flex" in makes) == ("flex" in case.peers)
        assert chosen in makes
        assert not set(makes) & {"reference", "math", "untouched", "sdpa_cpu_flash"}


def run(output: Path, *further: str) -> list[dict[str, str]]:
    arguments = ["--device", "cpu", "--size", "small", "--seconds", "0.001", "--commit", "abc"]
    assert bench_select.main([*arguments, "--output", str(output), *further]) == 0
    return harness.read(output)


def test_a_run_that_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "select.csv"
    common = ("--cases", "causal_d64_s512", "--peers", "sdpa", "presented")
    assert run(output, *common, "--budget-seconds", "-1") == []
    assert "2 cases left for a run with --append" in capsys.readouterr().out
    first = run(output, *common, "--append", "--passes", "forward")
    assert {row["side"] for row in first} == {"triton", "sdpa", "presented"}
    assert [row["side"] for row in first if row["chosen"]] == ["sdpa"]
    assert all(float(row["p50_us"]) > 0 and row["commit"] == "abc" for row in first)
    assert all(float(row["error"]) < 1e-4 for row in first if row["side"] != "sdpa")
    both = run(output, *common, "--append")
    assert both[: len(first)] == first
    assert {row["pass"] for row in both[len(first) :]} == {"backward"}
    assert len(bench_select.shapes_of(both)) == 2
    assert "2 shapes, 1 of them" in capsys.readouterr().out


def test_the_grid_has_what_it_should() -> None:
    assert len(BY_NAME) == len(CASES) >= 60
    assert {case.head_dim for case in CASES} == {64, 96, 128, 256}
    assert {case.seqlen for case in CASES} == {512, 1024, 2048, 4096, 8192, 32768}
    assert any(case.heads_kv < case.heads_q for case in CASES)
    assert {case.name for case in CASES if case.peers} == set(select_cases._FLEX)
    for case in CASES:
        assert case.heads_q % case.heads_kv == 0
        assert set(case.peers) <= set(kernel_peers.PEERS)
        assert case.name.endswith(f"_d{case.head_dim}_s{case.seqlen}")


def test_a_run_that_is_cut_off_has_some_of_everything() -> None:
    sorts = {case.name.split("_d")[0].removesuffix("_gqa") for case in CASES}
    assert {case.name.split("_d")[0].removesuffix("_gqa") for case in CASES[:52]} >= sorts - {
        "padded_causal",
        "lengths_causal",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_its_spec_is_of_the_sort_that_its_name_says(case: Case) -> None:
    spec = select_cases.spec_of(case, training=True)
    shape = shape_class.classify(spec)
    assert shape.mask == {"padded": "padding"}.get(case.name.split("_")[0], case.name.split("_")[0])
    assert (shape.head_dim, shape.seqlens) == (case.head_dim, (case.seqlen, case.seqlen))
    assert shape.grouped == (case.heads_kv < case.heads_q)
    assert spec.needs_grad
    assert not select_cases.spec_of(case, training=False).needs_grad


def test_cases_with_dropout_are_asked_for_by_name_alone() -> None:
    asked = [asked.case for asked in bench_select.plan(["dropout*"], ["forward"])]
    assert sorted(case.name for case in asked) == sorted(case.name for case in DROPOUT_CASES)
    assert all(case.name.startswith(DROPOUT) and case.dropout_p == 0.1 for case in asked)
    assert not {asked.case.name for asked in bench_select.plan(["*"], ["forward"])} & {case.name for case in asked}
    # Spec and sides have it, so that what is timed is what is chosen for.
    assert all(spec_of(case, training=True).score.dropout_p == 0.1 for case in asked)
