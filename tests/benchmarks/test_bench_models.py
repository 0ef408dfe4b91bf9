"""Benchmarks of whole models: decoding, shared sequences, padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.progress import Progress
from torch.distributed.device_mesh import init_device_mesh

import attn_compiler
from benchmarks import bench_decode_models, bench_shared_sequence, bench_unpad, harness, models
from benchmarks.bench_decode_models import Case
from benchmarks.bench_shared_sequence import COLUMNS, DECODE, MODEL, Job, Place
from benchmarks.bench_unpad import CASES, FILLS, padding
from tests.distributed import processes
from tests.thinned import asked_for, further

pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024,
}  # fmt: skip
CASE = Case(name="tiny", family="Llama", batch=2, length=32, filled=(20, 5))


def test_a_step_reads_the_cache_up_to_the_length_that_was_asked_for() -> None:
    with mock.patch.dict(bench_decode_models.SIDES, {"inductor": {"backend": "eager"}}):
        made = bench_decode_models.stepper(CASE, "inductor", None, "cpu", **TINY)
    assert bench_decode_models.error(made, 5) < 1e-5
    made.fill(5)
    short = made.step()
    assert made.cache.layers[0].cumulative_length == 6
    made.fill(20)
    assert not torch.allclose(made.step(), short)
    made.fill(5)
    assert torch.equal(made.step(), short)


def test_generate_counts_its_tokens() -> None:
    model = bench_decode_models.build(CASE, "inductor", "cpu", **TINY)
    ids = torch.randint(3, 1000, (2, 5))
    with Progress(disable=True) as bar, mock.patch.object(torch.cuda, "synchronize"):
        seconds, found = bench_decode_models.generate(model, ids, 3, "inductor", bar)
        (task,) = bar.tasks
    assert found.shape == (2, 8)
    assert seconds > 0
    assert task.completed == 3


# Rows of sequences that two processes share.
LENGTH = 32
JOBS = (
    Job(form="documents", length=LENGTH, method="all_gather", order="head_tail", rounds=1, dry=True),
    Job(form=MODEL, length=LENGTH, method="all_to_all", order="head_tail", rounds=1, dry=True),
    Job(form=DECODE, length=LENGTH, method="auto", order="head_tail", rounds=1, dry=True),
)


def rows_of(jobs: tuple[Job, ...]) -> list[dict[str, str]]:
    """Of each process."""
    place = Place(mesh=init_device_mesh("cpu", (processes.SIZE,)), device="cpu")
    found = []
    for job in jobs:
        torch.compiler.reset()
        found.append(bench_shared_sequence.measure(job, place))
    return found


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> dict[int, list[dict[str, str]]]:
    asked = asked_for(request, "at")
    by_rank = processes.run(rows_of, tuple(JOBS[at] for at in asked))
    return {at: [found[i] for found in by_rank] for i, at in enumerate(asked)}


@pytest.mark.parametrize("at", further(range(len(JOBS)), daily=()))
def test_a_dry_run_gives_the_numbers_of_one_process(rows: dict[int, list[dict[str, str]]], at: int) -> None:
    job, (first, second) = JOBS[at], rows[at]
    assert set(first) <= set(COLUMNS)
    assert first["numerics"] == second["numerics"] == "ok"
    assert first["output_difference"] == second["output_difference"]
    assert ("attends to the keys that it keeps" if job.form == DECODE else job.method) in first["note"]
    # Both ranks tell the slowest of both.
    what = "forward" if job.form == DECODE else "step"
    times = [[row[f"{side}_{what}_ms"] for side in ("whole", "shared")] for row in (first, second)]
    assert times[0] == times[1]
    share = float(times[0][0]) / processes.SIZE / float(times[0][1])
    assert float(first[f"efficiency_{what}"]) == pytest.approx(share, rel=0.02, abs=1e-3)


def test_a_nan_is_no_small_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_shared_sequence.dist, "all_gather_object", lambda into, own: into.__setitem__(slice(None), [own, own])
    )
    monkeypatch.setattr(bench_shared_sequence.dist, "get_world_size", lambda: 2)
    x = torch.ones(3)
    for found, expected in ((x, "ok"), (x * 1.1, "WRONG"), (x * float("nan"), "WRONG")):
        assert bench_shared_sequence._differences([(x, x), (found, x)], "cpu")["numerics"] == expected


# Batches of each fill, rows of a tiny model's, and the time that a run may take.
@pytest.mark.parametrize("fill", FILLS)
def test_batches_have_that_fill(fill: float) -> None:
    for case in CASES:
        mask = padding(*case.shape, fill)
        assert mask.shape == case.shape
        assert abs(float(mask.float().mean()) - fill) < 0.01
        assert int(mask.sum(1).max()) >= case.shape[1] * min(1.0, 2 * fill) - 1


def rows_unpad(path: Path, *arguments: str) -> list[dict[str, str]]:
    assert bench_unpad.main(["--dry-run", "--output", str(path), *arguments]) == 0
    return harness.read(path)


@pytest.mark.further
@pytest.mark.parametrize("name", ["T5", "loss"])
def test_a_row_for_each_fill(name: str, tmp_path: Path) -> None:
    found = rows_unpad(tmp_path / "rows.csv", "--cases", name, "--sides", "inductor", "unpad")
    assert [row["fill"][:3] for row in found] == ["0.5", "0.7", "1.0"]
    assert all(row["kept"] == row["failure"] == row["padded_p50_ms"] == "" for row in found)
    assert all(float(row["error"]) < 1e-5 and float(row["over_inductor"]) > 0 for row in found)


def test_nothing_starts_without_time(tmp_path: Path) -> None:
    assert rows_unpad(tmp_path / "rows.csv", "--budget", "-1") == []


@pytest.mark.in_turns(13)
@pytest.mark.parametrize("name", models.FAMILIES)
def test_every_small_family_runs_in_every_way(name: str) -> None:
    model = models.build(name, "small", "eager")
    for scenario in models.SCENARIOS.values():
        if models.applies(name, scenario):
            with torch.no_grad():
                output = model(**models.example_inputs(name, "small", scenario))[0]
            assert output.isfinite().all(), scenario.name


def test_the_same_seed_gives_the_same_model_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = (models.build("gpt2", "small", "sdpa").state_dict() for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(first, second)


def test_padding_comes_first_for_a_decoder_and_last_for_an_encoder() -> None:
    left, right = (models.padding_mask(4, 8, left=side) for side in (True, False))
    assert left[:, -1].tolist() == [1, 1, 1, 1] == right[:, 0].tolist()
    assert left.sum(1).tolist() == right.sum(1).tolist() == [8, 7, 6, 5]


@pytest.mark.parametrize(("heads", "seqlen"), [(8, 6), (2, 6), (4, 3), (8, 9)])
def test_nothing_reads_q_k_and_v_and_has_gradients_of_all(heads: int, seqlen: int) -> None:
    q = torch.randn(2, 8, 6, 4, requires_grad=True)
    k, v = (torch.randn(2, heads, seqlen, 4, requires_grad=True) for _ in range(2))
    out, weights = models.nothing(torch.nn.Identity(), q, k, v, None, scaling=1.0)
    assert out.shape == (2, 6, 8, 4)
    assert weights is None
    assert all(bool(grad.any()) for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_model_whose_attention_is_nothing_has_none() -> None:
    model = models.build("bert", "small", models.NOTHING)
    with torch.no_grad():
        reports = attn_compiler.explain(model, **models.example_inputs("bert", "small", models.SCENARIOS["prefill"]))
    assert not any(report.sites for report in reports)
