"""First steps of compiled models, and their profile."""

from __future__ import annotations

import cProfile
import json
import pstats
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import bench_first_step, first_step, first_step_profile, harness
from benchmarks.bench_first_step import COLUMNS
from benchmarks.first_step import CALLS, MODELS, Job, Kernels

pytest.importorskip("transformers", reason="these tests build models of transformers: pip install -e '.[models]'")

# Rows of first steps.
NAME = dict(zip(bench_first_step.ROW, ("llama", "train_right", "64", "2", "small", "1", "", "2"), strict=True))


def found(first: float, **others: Any) -> dict[str, Any]:
    return {
        "first_seconds": first, "second_seconds": 0.5, "further_seconds": "", "cpu_seconds": first / 2, "import_seconds": 0.25,
        "passes_seconds": 0.125, "kernels_ahead": 3, "kernels_late": 0, "from_cache": "1/1", "sites": "triton x8",
        **others,
    }  # fmt: skip


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


def test_a_process_has_caches_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def process(command: Any, **given: Any) -> Any:
        asked.append((command, given))
        return SimpleNamespace(returncode=0, stdout="words\n" + json.dumps(found(1.0)), stderr="")

    monkeypatch.setattr(subprocess, "run", process)
    job = Job(model="llama", call="train", length=64, batch=2, size="small", device="cpu", side="inductor")
    assert bench_first_step.fresh_process(job, tmp_path, seconds=5, threads="2")["first_seconds"] == 1.0
    ((command, given),) = asked
    assert Job(**json.loads(command[-1])) == job
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert given["env"][name].startswith(str(tmp_path))


def test_kernels_of_ours_are_counted_and_none_that_was_on_disk() -> None:
    kernels, ours = Kernels(), SimpleNamespace(fn=SimpleNamespace(__module__="attn_compiler.lowerings"))
    kernels(src=ours, cache_hit=False, times=None)
    kernels(src=ours, cache_hit=True)
    kernels(src=SimpleNamespace(fn=SimpleNamespace(__module__="torch")), cache_hit=False)
    kernels(src=SimpleNamespace(), cache_hit=False)
    assert (kernels.ahead, kernels.late) == (0, 1)


@pytest.mark.further
@pytest.mark.parametrize("side", ["attn_compiler", "eager"])
def test_one_process_measures_both_steps(side: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    given: dict[str, Any] = {"length": 16, "batch": 2, "size": "small", "device": "cpu", "further": "24 9"}
    file = tmp_path / "step.prof"
    measured = first_step.measure(Job(model="bert", call="prefill_right", side=side, profile=str(file), **given))
    assert pstats.Stats(str(file)).total_calls > 1000  # type: ignore[attr-defined]
    assert (measured.cpu_seconds > 0, len(measured.further_seconds.split())) == (True, 2)
    assert measured.first_seconds > measured.second_seconds > 0
    assert measured.first_seconds > measured.import_seconds
    assert bool(measured.sites) == bool(measured.passes_seconds) == (side == "attn_compiler")


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", MODELS)
def test_models_take_their_inputs(name: str) -> None:
    if name == "sd3":
        pytest.importorskip("diffusers")
    model = MODELS[name]
    for call in (CALLS["prefill"], CALLS["prefill_left"], CALLS["train_checkpoint"]):
        if first_step.applies(model, call):
            given: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
            made = first_step.build(name, call, "small", 12, **given)
            inputs = first_step.inputs_of(name, call, "small", 12, 2, **given)
            out = harness.make_step(made, inputs, training=call.training)()
            assert out.shape[0] == 2
            assert out.isfinite().any()


def test_padding_is_on_the_side_that_the_call_says() -> None:
    def mask(call: str) -> torch.Tensor:
        given: Any = first_step.inputs_of("llama", CALLS[call], "small", 8, 2, dtype=torch.float32, device="cpu")
        return given["attention_mask"]  # type: ignore[no-any-return]

    assert mask("prefill_ones").all()
    assert mask("prefill_left")[1].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert mask("prefill_right")[1].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert "attention_mask" not in first_step.inputs_of(
        "llama", CALLS["train"], "small", 8, 2, dtype=torch.float32, device="cpu"
    )


# Two profiles of a first step are compared.
@pytest.mark.parametrize(
    ("file", "name", "whose"),
    [
        ("/venv/lib/python3.12/site-packages/torch/_dynamo/guards.py", "check", "torch/_dynamo"),
        ("/usr/lib/python3/dist-packages/triton/runtime/jit.py", "run", "triton"),
        ("/home/me/attn_compiler/compiling/backend.py", "_compile", "attn_compiler"),
        ("/usr/lib/python3.12/inspect.py", "getmodule", "inspect"),
        ("/tmp/caches/r/ab/cabc.py", "<listcomp>", "generated code and others"),
        ("~", "<built-in method builtins.exec>", "<built-in method builtins.exec>"),
    ],
)
def test_whose_a_function_is(file: str, name: str, whose: str) -> None:
    assert first_step_profile.library(file, name) == whose


def test_the_largest_difference_comes_first() -> None:
    assert first_step_profile.compared({"a": 1.0, "b": 5.0}, {"a": 0.5, "c": 2.0}, most=2) == [
        ("b", 5.0, 0.0),
        ("a", 1.0, 0.5),
    ]


def test_two_profiles_are_told_by_library_and_by_function(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("ours", "theirs")]
    for file, times in zip(files, (20_000, 1), strict=True):
        profile = cProfile.Profile()
        with profile:
            json.loads(json.dumps(list(range(times))))
        profile.dump_stats(file)
    said = first_step_profile.said(*map(first_step_profile.seconds_of, files), most=4)
    first, whole = said.index("with what they call:"), said[-8:]
    assert said[0].startswith("in all: ours ")
    assert any("json" in line for line in said[1:first])
    assert any("dumps" in line for line in whole)
