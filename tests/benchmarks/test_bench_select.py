"""Sides are the lowerings that take a shape and the peers, one of them chosen (Triton in its interpreter)."""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_compiler.spec.target import Target
from benchmarks import bench_kernels, bench_select, kernel_cases, select_cases, standing
from benchmarks.kernel_cases import Case, Problem
from benchmarks.kernel_peers import Side
from tests.lowerings.fa4.stand_in import StandIn, flash  # noqa: F401 - a fixture

KINDS = ["causal_d64_s8192", "causal_gqa_d64_s8192", "full_d64_s2048", "window_d64_s2048", "padded_d64_s2048"]


def small(name: str) -> Case:
    return select_cases.BY_NAME[name].small


def problem_of(name: str, *, training: bool = True) -> Problem:
    return kernel_cases.build(small(name), device="cpu", dtype=torch.float32, training=training)


def outcome(side: Side, problem: Problem) -> list[Tensor]:
    out = side.call()
    used = kernel_cases.used_queries(problem.case)
    grads = torch.autograd.grad(out, side.leaves[:3], bench_kernels.gradient_of_out(problem))
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


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *further: str) -> list[dict[str, str]]:
    arguments = ["bench_select", "--device", "cpu", "--size", "small", "--seconds", "0.001", "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--output", str(output), *further])
    assert bench_select.main() == 0
    if not output.exists():
        return []
    with output.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_that_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "select.csv"
    common = ("--cases", "causal_d64_s512", "--peers", "sdpa", "presented")
    assert run(monkeypatch, output, *common, "--budget-seconds", "-1") == []
    assert "2 passes left for a run with --append" in capsys.readouterr().out
    first = run(monkeypatch, output, *common, "--append", "--passes", "forward")
    assert {row["side"] for row in first} == {"triton", "sdpa", "presented"}
    assert [row["side"] for row in first if row["chosen"]] == ["sdpa"]
    assert all(float(row["p50_us"]) > 0 and row["commit"] == "abc" for row in first)
    assert all(float(row["error"]) < 1e-4 for row in first if row["side"] != "sdpa")
    both = run(monkeypatch, output, *common, "--append")
    assert both[: len(first)] == first
    assert {row["pass"] for row in both[len(first) :]} == {"backward"}
    assert len(standing.of(both)) == 2
    assert "2 shapes, 1 of them" in capsys.readouterr().out
