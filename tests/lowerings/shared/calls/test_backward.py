"""What the kernels of one backward are told: names of tensors, and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.shared.calls.arguments import prepare
from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.launching.replaying import alike
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import build, planned

#: of what `started` was given: arguments and part
Started = list[tuple[Arguments, str]]


@pytest.fixture
def started() -> Started:
    """One backward, whose kernel was launched without and then with kept scores."""
    problem = build(Case(name="backward", bias="hqk"), device="cpu")
    found: Started = []

    def start(kernel: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str) -> None:
        found.append((arguments(), part))

    with planned(problem.plan):
        prepared = prepare(problem.text)
        tensors = {"Q": problem.q, "K": problem.k, "V": problem.v, **prepared.named(problem.operands)}
        tensors |= {"GradOut": torch.zeros_like(problem.q), "Out": torch.zeros_like(problem.q)}
        tensors["RowStats"] = torch.zeros(*problem.q.shape[:2], 2, 128)
        same = alike("op_backward", problem.text, (problem.q, problem.k, problem.v))
        shared = Backward(prepared=prepared, same=same, tensors=tensors, start=start)
        shared.launch("kernel", _arguments, "all")
        tensors["Scores"] = torch.zeros(2, 2, 70, 80)
        shared.launch("kernel", _arguments, "scores")
    assert len(shared.ran) == 2
    return found


def _arguments(shared: Backward) -> Arguments:
    return Arguments(
        grid=(1, 1, 1), tensors=shared.parameters("GradQ") | shared.scores, numbers=shared.numbers() | shared.pitch
    )


def test_a_launch_is_told_tensors_and_numbers(started: Started) -> None:
    told, part = started[0]
    assert part == "all"
    assert {"Q", "K", "V", "GradOut", "RowStats", "GradQ"} <= set(told.tensors)
    assert "GradK" not in told.tensors
    assert told.tensors["Scores"] is None
    assert (told.numbers["stats_rows"], told.numbers["pitch"]) == (128, 0)


def test_scores_that_are_kept_have_their_parameter(started: Started) -> None:
    told, part = started[1]
    assert part == "scores"
    assert (told.tensors["Scores"], told.numbers["pitch"]) == ("Scores", 80)
