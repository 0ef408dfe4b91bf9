"""The gate's rows. What they compile takes minutes, and is no test."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import bench_mla, decode_cases, gate_cases, harness, select_cases
from benchmarks.gate_rule import OURS, PEER


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_there_is_some_of_every_kind_and_no_name_twice(device: str) -> None:
    rows = gate_cases.rows(device)
    assert {row.kind for row in rows} == {"kernel", "decode", "end to end", "first step"}
    assert len({row.name for row in rows}) == len(rows)


def test_a_name_says_the_kind_on_every_device() -> None:
    """What reads the rounds of several runs knows rows by their names alone."""
    named = {(row.name, row.kind) for device in ("cpu", "cuda:0") for row in gate_cases.rows(device)}
    assert len(named) == len({name for name, _ in named})


def test_both_sides_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short steps are called several times in a row, and the times are those of one call."""
    called: list[str] = []

    def step(side: str) -> torch.Tensor:
        called.append(side)
        return torch.ones(())

    monkeypatch.setattr(gate_cases, "_times", lambda step: 3)
    timed = gate_cases.in_turn({side: functools.partial(step, side) for side in (OURS, PEER)}, "cpu")
    monkeypatch.setattr(
        harness, "interleave", lambda steps, *given, **named: {s: [6.0] for s in steps if steps[s]() is not None}
    )
    assert timed(0.0) == {OURS: [2.0], PEER: [2.0]}
    assert called == [OURS] * 3 + [PEER] * 3


def test_a_turn_is_long_enough_for_the_clock() -> None:
    assert gate_cases._times(lambda: torch.ones(())) > 100
    slow = torch.ones(700, 700)
    assert gate_cases._times(lambda: [slow @ slow for _ in range(20)][-1]) == 1


def test_whole_models_are_short() -> None:
    model, given = gate_cases.model_of("bert", "eager", "train_padded", "cpu")
    assert model.training
    assert len(model.encoder.layer) == 2
    assert given["input_ids"].shape == given["attention_mask"].shape == (1, 128)
    assert not given["attention_mask"].all()


def test_names_of_cases_are_known() -> None:
    """What a row of a GPU reads when it is made, which no machine without one does."""
    assert {"causal_d128_s2048", "padded_d64_s2048"} <= select_cases.BY_NAME.keys()
    assert {"b16_4k_half", "b1_32k"} <= decode_cases.BY_NAME.keys()
    assert {"v2_lite_b1_4k"} <= {case.name for case in bench_mla.GPU_CASES}
    assert {"small_b1_256"} <= {case.name for case in bench_mla.SMALL_CASES}
