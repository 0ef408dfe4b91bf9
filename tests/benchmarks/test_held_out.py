"""Models that nothing is tuned for, found and bench_select."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_held_out as held_out, bench_select, members, models
from benchmarks.bench_held_out import summed_up
from benchmarks.members import Limits, Row
from tests.hf.today.every import MODEL, MODELS

# The set that nothing was tuned for.
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_rule_leaves_out_what_another_benchmark_times() -> None:
    held = held_out.drawn()
    assert len(held) == held_out.DRAWN
    timed = {family.config for family in models.FAMILIES.values()}
    assert timed <= held_out.TIMED.keys()
    assert not held_out.TIMED.keys() & {held_out.architecture(model) for model in held}
    assert all((RESULTS / name).is_file() for name in held_out.TIMED.values())


def test_nobody_picks_a_model() -> None:
    def hashed(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()

    names = [model.name for model in held_out.drawn()]
    largest = max(map(hashed, names))
    others = [m for m in MODELS if m.device == "meta" and m.name not in names]
    assert all(hashed(m.name) > largest for m in others if held_out.architecture(m) not in held_out.TIMED)


def test_each_model_has_inference_and_training_where_it_is_called_so() -> None:
    calls = {(case.model, case.call) for case in held_out.plan()}
    for model in held_out.drawn():
        names = {call.name for call in model.calls} - {"decode with a cache"}
        assert {call for name, call in calls if name == model.name} == names


@pytest.mark.parametrize(
    ("model", "call", "left"), [("Hunyuan 7B", "prefill padded", True), ("Hunyuan 7B", "training", False)]
)
def test_tokens_are_random_and_padded(model: str, call: str, left: bool) -> None:
    pytest.importorskip("transformers", reason="the models are transformers': pip install -e '.[models]'")
    case = held_out.HeldOut(model=model, call=call).case("full", "meta")
    asked = next(each for each in MODEL[model].calls if each.name == call)
    given = held_out.arguments(case.model, asked, "cpu")
    mask, tokens = given["attention_mask"], given["input_ids"]
    assert "labels" not in given
    assert case.training == (call == "training") == case.model.training
    lengths = mask.sum(-1)
    assert lengths[0] == mask.shape[1]
    assert (lengths[1:] < mask.shape[1]).all()
    assert bool(mask[1, 0]) is not left
    assert tokens.unique().numel() > 100
    assert case.valid is not None
    assert case.valid.shape == tokens.shape


def test_an_image_model_gets_noise_and_keeps_what_says_where_things_are() -> None:
    pytest.importorskip("diffusers", reason="the model is diffusers': pip install -e '.[models,demo]'")
    call = MODEL["PixArt Sigma"].calls[0]
    case = held_out.HeldOut(model="PixArt Sigma", call=call.name).case("full", "meta")
    given = held_out.arguments(case.model, call, "cpu")
    assert float(given["hidden_states"].float().std()) == pytest.approx(1.0, abs=0.05)
    assert given["hidden_states"].dtype == torch.bfloat16
    assert given["timestep"].tolist() == [1, 1]
    assert given["encoder_attention_mask"].sum(-1).tolist() == [300, 225]
    assert given["added_cond_kwargs"] == {"resolution": None, "aspect_ratio": None}
    assert case.valid is None


def test_the_sum_names_the_slowest_and_counts_what_failed() -> None:
    rows = [
        {"model": "A", "call": "training", "ratio": "2.0"},
        {"model": "B", "call": "prefill padded", "ratio": "0.5"},
        {"model": "C", "call": "training", "ratio": "", "failure": "RuntimeError: no"},
    ]
    assert summed_up(rows) == "2 cases, geometric mean 1.00x, the slowest 0.50x (B, prefill padded), 1 failed"
    assert summed_up(rows[2:]) == "nothing was measured"


def rows(case: str, which: str, chosen: str, **times: float) -> list[dict[str, str]]:
    return [
        {"case": case, "pass": which, "side": side, "chosen": "yes" if side == chosen else "", "p50_us": str(took)}
        for side, took in times.items()
    ]


def test_best_and_regret() -> None:
    """The choice is the best where another is as fast; a shape without a measured choice is left out."""
    (shape,) = bench_select.shapes_of(
        rows("a", "forward", "fa4", fa4=103.0, sdpa_cudnn=100.0, sdpa=150.0, presented=50.0)
    )
    assert (shape.best, shape.regret) == ("sdpa_cudnn", pytest.approx(1.03))
    assert shape.ratio("sdpa") == pytest.approx(150 / 103)
    assert shape.ratio("flex") is None
    (even,) = bench_select.shapes_of(rows("a", "forward", "fa4", sdpa_cudnn=100.0, fa4=100.0))
    assert (even.best, even.regret) == ("fa4", 1.0)
    failed = rows("a", "forward", "fa4", fa4=1.0, sdpa=1.0)
    failed[0] |= {"p50_us": "", "failure": "RuntimeError"}
    assert bench_select.shapes_of(failed) == []


def test_summary() -> None:
    measured = [
        *rows("a", "forward", "fa4", fa4=100.0, sdpa=200.0, presented=400.0),
        *rows("a", "backward", "fa4", fa4=100.0, sdpa=50.0),
        *rows("b", "forward", "triton", triton=102.0, fa4=100.0, sdpa=102.0),
    ]
    said = bench_select.summary(bench_select.shapes_of(measured))
    assert "3 shapes, 2 of them" in said
    assert "within 3% of the best side: 66.7%; more than 10% slower: 1" in said
    assert "worst: a backward, fa4 takes 2.000 times sdpa" in said
    assert "sdpa over ours, geometric mean of 3: 1.000" in said
    assert "presented over ours, geometric mean of 1: 4.000" in said
    assert bench_select.summary([]) == "nothing was measured"


# Cases that groups of processes measure.
LONG = 600.0


def member(rank: int, folder: str, case: str) -> None:
    """What the case says: "answer", "raise" (the second process), "die" (the second process), "late" or "slow"."""
    if case == "die":
        if rank:
            os._exit(7)
        time.sleep(3600)
    members.write(rank, folder, lambda: _measured(rank, folder, case))


def _measured(rank: int, folder: str, case: str) -> Row:
    if case == "raise" and rank:
        raise RuntimeError("no such thing")
    if case in ("raise", "late"):
        time.sleep(3600)
    members.wait_for_turn(rank, folder)
    if case == "slow":
        time.sleep(3600)
    begin = time.monotonic()
    time.sleep(0.2)
    return {"rank": str(rank), "begin": str(begin), "end": str(time.monotonic())}


def run(cases: list[str], **limits: Any) -> list[tuple[str, Row]]:
    given = Limits(**{"together": 2, "seconds": LONG, "turn_seconds": LONG, **limits})
    # What the target is in. A server of forks that runs already has imported something else: each process imports this then.
    found = members.rows(cases, member, processes=2, limits=given, until=time.monotonic() + LONG, imports=(__name__,))
    return list(found)


@pytest.mark.further
@pytest.mark.parametrize(
    ("case", "limits", "failure"),
    [
        ("raise", {}, "rank 1: RuntimeError: no such thing"),
        ("die", {}, "a process died, exit codes [-9, 7]"),
        ("late", {"seconds": 1.0}, "TimeoutError: not ready after 1 s"),
        ("slow", {"turn_seconds": 1.0}, "TimeoutError: not timed within 1 s"),
    ],
)
def test_what_fails_is_a_row_and_nothing_is_left(case: str, limits: dict[str, float], failure: str) -> None:
    assert run([case], **limits) == [(case, {"failure": failure})]


def test_one_group_is_timed_at_a_time_and_a_failure_costs_no_other() -> None:
    found = run(["answer", "raise", "answer"], together=3)
    assert [case for case, _ in found] == ["answer", "raise", "answer"]
    assert found[1][1] == {"failure": "rank 1: RuntimeError: no such thing"}
    first, last = found[0][1], found[2][1]
    assert first["rank"] == last["rank"] == "0"
    assert float(first["end"]) <= float(last["begin"])


def test_no_wave_begins_after_the_budget(tmp_path: Path) -> None:
    limits = Limits(together=1, seconds=LONG, turn_seconds=LONG)
    left = members.rows(["answer"], member, processes=2, limits=limits, until=time.monotonic() - 1, imports=(__name__,))
    assert not list(left)
