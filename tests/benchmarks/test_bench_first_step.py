"""Rows of first steps: what is measured, how ratios and means follow, and that a process that fails costs its row alone."""

from __future__ import annotations

import argparse
import json
import pstats
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="these tests build models of transformers: pip install -e '.[models]'")

from benchmarks import bench_first_step, first_step, first_step_cases, harness
from benchmarks.bench_first_step import COLUMNS, StepFailed
from benchmarks.first_step import Job, Kernels
from benchmarks.first_step_cases import CALLS, MODELS

NAME = {"model": "llama", "call": "train_right", "length": "64", "batch": "2", "size": "small", "jobs": "1"}


def found(first: float, **others: Any) -> dict[str, Any]:
    return {
        "first_seconds": first,
        "second_seconds": 0.5,
        "cpu_seconds": first / 2,
        "import_seconds": 0.25,
        "passes_seconds": 0.125,
        "kernels_ahead": 3,
        "kernels_late": 0,
        "from_cache": "1/1",
        "sites": "triton x8",
        **others,
    }


def run(job: Job, caches: Path) -> Mapping[str, Any]:
    """Ours takes 9 s and with full caches 6, Inductor 6 and 2."""
    is_warm = (caches / "used").exists()
    caches.mkdir(exist_ok=True)
    (caches / "used").touch()
    return found({"attn_compiler": (9.0, 6.0), "inductor": (6.0, 2.0)}[job.side][is_warm])


def test_a_row_has_both_sides_with_empty_caches_and_then_with_theirs() -> None:
    row = bench_first_step.measured(NAME, "cpu", run)
    assert row["ours_cold_first_seconds"] == "9.000"
    assert row["ours_warm_first_seconds"] == "6.000"
    assert row["inductor_cold_first_seconds"] == "6.000"
    assert (row["ratio_cold"], row["ratio_warm"], row["ratio_warm_cpu"]) == ("1.500", "3.000", "3.000")
    assert (row["ours_cold_kernels_ahead"], row["ours_warm_passes_seconds"], row["sites"]) == (
        "3",
        "0.125",
        "triton x8",
    )
    assert set(row) | {"failure"} == set(COLUMNS)


def test_both_sides_run_beside_each_other() -> None:
    """Whatever else the machine does meanwhile then slows both alike."""
    meet = threading.Barrier(2)

    def together(job: Job, caches: Path) -> Mapping[str, Any]:
        meet.wait(timeout=30)
        return run(job, caches)

    row = bench_first_step.measured(NAME, "cpu", together, warm_runs=2)
    assert row["ratio_warm"] == "3.000"


def test_of_several_warm_runs_that_with_the_median_time_counts() -> None:
    times = {
        side: iter((9.0, *warm)) for side, warm in (("attn_compiler", (4.0, 8.0, 5.0)), ("inductor", (2.0, 1.0, 9.0)))
    }

    def changing(job: Job, caches: Path) -> Mapping[str, Any]:
        first = next(times[job.side])
        return found(first, second_seconds=first / 10)

    row = bench_first_step.measured(NAME, "cpu", changing, warm_runs=3)
    assert (row["ours_warm_first_seconds"], row["ours_warm_second_seconds"]) == ("5.000", "0.500")
    assert (row["inductor_warm_first_seconds"], row["ratio_warm"], row["warm_runs"]) == ("2.000", "2.500", "3")


def test_a_profile_of_each_side_is_one_more_run(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def noting(job: Job, caches: Path) -> Mapping[str, Any]:
        asked.append((job.side, job.profile))
        return run(job, caches)

    row = bench_first_step.measured(NAME, "cpu", noting, profile=tmp_path)
    assert row["ours_warm_first_seconds"] == "6.000"
    assert sorted(asked[4:]) == [
        ("attn_compiler", str(tmp_path / "llama-train_right-64-ours.prof")),
        ("inductor", str(tmp_path / "llama-train_right-64-inductor.prof")),
    ]


def test_slow_rows_are_those_above_a_goal_and_of_a_row_the_last_time_counts() -> None:
    def row(length: int, cold: str, warm: str, failure: str = "") -> dict[str, str]:
        return {**NAME, "length": str(length), "ratio_cold": cold, "ratio_warm": warm, "failure": failure}

    rows = [row(1, "1.25", "1.1"), row(2, "1.3", "1.0"), row(3, "1.0", "1.5"), row(4, "9", "9"), row(4, "1", "1")]
    assert bench_first_step.slow([*rows, row(5, "", "", "too long")]) == [
        "llama/train_right/3",
        "llama/train_right/2",
    ]


def test_what_fails_is_told_in_its_row() -> None:
    def fail(job: Job, caches: Path) -> Mapping[str, Any]:
        if job.side == "inductor":
            raise StepFailed("out of memory")
        return found(1.0)

    row = bench_first_step.measured(NAME, "cpu", fail)
    assert row["failure"] == "inductor cold: out of memory"
    assert "ratio_cold" not in row
    assert "FAILED, inductor cold: out of memory" in bench_first_step.said(row)


def test_means_are_geometric_and_leave_out_what_failed() -> None:
    rows = [
        {"call": "prefill", "failure": "", "ratio_cold": "2.0", "ratio_warm": "1.0"},
        {"call": "train", "failure": "", "ratio_cold": "0.5", "ratio_warm": "4.0"},
        {"call": "train", "failure": "too long"},
    ]
    assert bench_first_step.means(rows) == [
        "prefill: 1 rows, ours / Inductor cold 2.000, warm 1.000",
        "training: 1 rows, ours / Inductor cold 0.500, warm 4.000",
        "all: 2 rows, ours / Inductor cold 1.000, warm 2.000",
    ]
    assert bench_first_step.means([]) == []


def test_rows_are_calls_that_a_model_has() -> None:
    rows = bench_first_step.names(
        ["llama", "sd3", "bert"], ["prefill_left", "prefill_cache", "train"], [64, 32], batch=2, size="small", jobs=1
    )
    assert [(row["model"], row["call"], row["length"]) for row in rows] == [
        (model, call, length)
        for length in ("32", "64")
        for model, call in (
            ("llama", "prefill_left"),
            ("bert", "prefill_left"),
            ("llama", "prefill_cache"),
            ("llama", "train"),
            ("sd3", "train"),
            ("bert", "train"),
        )
    ]


def test_rows_that_are_picked_keep_their_order() -> None:
    rows = bench_first_step.picked(["t5/train_right/64", "sd3/prefill/32"], batch=2, size="small", jobs=4)
    assert [(row["model"], row["call"], row["length"], row["jobs"]) for row in rows] == [
        ("t5", "train_right", "64", "4"),
        ("sd3", "prefill", "32", "4"),
    ]


@pytest.mark.parametrize(
    "row", ["llama", "llama/prefill/long", "lama/prefill/64", "llama/chat/64", "sd3/train_right/64"]
)
def test_a_row_that_is_none_is_refused(row: str) -> None:
    with pytest.raises(ValueError, match=r"row is model/call/length|is not called as"):
        bench_first_step.picked([row], batch=2, size="small", jobs=1)


def test_rows_are_on_disk_as_they_come_and_none_is_begun_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_first_step, "fresh_process", lambda job, caches, **_: run(job, caches))
    file = harness.CsvFile(tmp_path / "rows.csv", [*COLUMNS, "device"])
    options = {"device": "cpu", "jobs": 2, "process_seconds": 9.0, "warm_runs": 1, "profile": None}
    for budget, count in ((60.0, 2), (-1.0, 2)):
        wanted = [{**NAME, "length": str(length)} for length in (32, 64)]
        chosen = argparse.Namespace(**options, budget_seconds=budget)
        bench_first_step.measure_all(wanted, file, {"device": "here"}, chosen)
        assert len(harness.read(file.path)) == count
    assert {row["ratio_cold"] for row in harness.read(file.path)} == {"1.500"}


def test_a_process_has_caches_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def process(command: Any, **given: Any) -> Any:
        asked.append((command, given))
        return SimpleNamespace(returncode=0, stdout="words\n" + json.dumps(found(1.0)), stderr="")

    monkeypatch.setattr(subprocess, "run", process)
    job = Job(model="llama", call="train", length=64, batch=2, size="small", device="cpu", side="inductor")
    assert bench_first_step.fresh_process(job, tmp_path, seconds=5, threads=2)["first_seconds"] == 1.0
    ((command, given),) = asked
    assert Job(**json.loads(command[-1])) == job
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert given["env"][name].startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no\n"), "RuntimeError: no"),
        (subprocess.TimeoutExpired("python", 5), "not done after 5 s"),
    ],
    ids=["fails", "takes too long"],
)
def test_a_process_that_fails(answer: Any, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def process(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(subprocess, "run", process)
    job = Job(model="llama", call="train", length=64, batch=2, size="small", device="cpu", side="inductor")
    with pytest.raises(StepFailed, match=words):
        bench_first_step.fresh_process(job, tmp_path, seconds=5, threads=2)


def test_kernels_of_ours_are_counted_and_none_that_was_on_disk() -> None:
    kernels, ours = Kernels(), SimpleNamespace(fn=SimpleNamespace(__module__="attn_compiler.lowerings"))
    kernels(src=ours, cache_hit=False, times=None)
    kernels(src=ours, cache_hit=True)
    kernels(src=SimpleNamespace(fn=SimpleNamespace(__module__="torch")), cache_hit=False)
    kernels(src=SimpleNamespace(), cache_hit=False)
    assert (kernels.ahead, kernels.late) == (0, 1)


@pytest.mark.parametrize("side", ["attn_compiler", "eager"])
def test_one_process_measures_both_steps(side: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    given: dict[str, Any] = {"length": 16, "batch": 2, "size": "small", "device": "cpu", "side": side}
    file = tmp_path / "step.prof"
    measured = first_step.measure(Job(model="bert", call="prefill_right", **given, profile=str(file)))
    assert pstats.Stats(str(file)).total_calls > 1000  # type: ignore[attr-defined]
    assert measured.cpu_seconds > 0
    assert measured.first_seconds > measured.second_seconds > 0
    assert measured.first_seconds > measured.import_seconds
    assert bool(measured.sites) == bool(measured.passes_seconds) == (side == "attn_compiler")


@pytest.mark.parametrize("name", MODELS)
def test_models_take_their_inputs(name: str) -> None:
    if name == "sd3":
        pytest.importorskip("diffusers")
    model = MODELS[name]
    for call in (CALLS["prefill"], CALLS["prefill_left"], CALLS["train_checkpoint"]):
        if first_step_cases.applies(model, call):
            given: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
            made = first_step_cases.build(name, call, "small", 12, **given)
            inputs = first_step_cases.inputs(name, call, "small", 12, 2, **given)
            out = harness.make_step(made, inputs, training=call.training)()
            assert out.shape[0] == 2
            assert out.isfinite().any()


def test_every_model_has_eight_layers_and_four_run_on_a_cpu() -> None:
    for model in MODELS.values():
        full = first_step_cases.arguments(model, "full", 64)
        assert [full[name] for name in model.per_layer] == [8] * len(model.per_layer)
    assert sum(model.on_cpu for model in MODELS.values()) == 4


def test_padding_is_on_the_side_that_the_call_says() -> None:
    def mask(call: str) -> torch.Tensor:
        given: Any = first_step_cases.inputs("llama", CALLS[call], "small", 8, 2, dtype=torch.float32, device="cpu")
        return given["attention_mask"]  # type: ignore[no-any-return]

    assert mask("prefill_ones").all()
    assert mask("prefill_left")[1].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert mask("prefill_right")[1].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert "attention_mask" not in first_step_cases.inputs(
        "llama", CALLS["train"], "small", 8, 2, dtype=torch.float32, device="cpu"
    )
