"""The launches for gradients of what is added to the scores; their numbers are those of test_triton_launch.py's cases."""

from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_launches import SIZES, launched
from tests.lowerings.kernel_problems import build


@pytest.mark.parametrize(("axes", "grid"), [("hq", (5, 8, 1)), ("bk", (17, 1, 3)), ("", (1, 1, 1))])
def test_the_gradient_of_a_bias_has_a_program_for_each_of_its_own_tiles(axes: str, grid: tuple[int, int, int]) -> None:
    problem = build(Case(name="grids_bias", **SIZES, bias=axes))  # type: ignore[arg-type]
    found = launched(problem)
    assert found["attention_grad_bias"].grid == grid
    assert found["attention_grad_q_kept"].grid == (5 * 8 * 3, 1, 1)


@pytest.mark.parametrize(
    ("axes", "grid"),
    [
        # two spans of 128 queries, which are 4 blocks: programs of dq, and of the bias, for each head and batch row
        ("bhqk", (2 * (4 + 4 * 17), 8, 3)),
        ("hqk", (2 * (4 * 3 + 4 * 17), 8, 1)),
        ("bqk", (2 * (4 * 8 + 4 * 17), 1, 3)),
        ("qk", (2 * (4 * 24 + 4 * 17), 1, 1)),
    ],
)
def test_a_bias_of_both_axes_gets_its_gradient_in_the_launch_of_dq(axes: str, grid: tuple[int, int, int]) -> None:
    problem = build(Case(name="grids_bias", **SIZES, bias=axes))  # type: ignore[arg-type]
    found = launched(problem)
    assert found["attention_grad_q_kept"].grid == grid
    assert "attention_grad_bias" not in found


@pytest.mark.parametrize("axes", ["bhqk", "hqk"])
def test_an_empty_batch_starts_nothing(axes: str) -> None:
    problem = build(Case(name="empty", **(SIZES | {"batch": 0}), bias=axes))  # type: ignore[arg-type]
    assert 0 in launched(problem)["attention_grad_kv"].grid
    dq = launched(problem)["attention_grad_q_kept"]
    # A bias that the batch shares still gets its zeros.
    assert (0 in dq.grid) == (axes == "bhqk")


@pytest.mark.parametrize("given", [{"bias": "hqk"}, {"distances": 1}], ids=str)
def test_a_span_holds_whole_tiles(given: dict[str, object]) -> None:
    problem = build(Case(name="wide", **SIZES, **given))  # type: ignore[arg-type]
    call = Call.from_text(problem.text)
    wide = dataclasses.replace(call.tiles, grad_q=dataclasses.replace(call.tiles.grad_q, queries=256))
    problem = dataclasses.replace(problem, text=dataclasses.replace(call, tiles=wide).to_text())
    numbers = launched(problem)["attention_grad_q_kept"].numbers
    assert numbers["SPAN"] % numbers["BLOCK_M"] == numbers["SPAN"] % numbers["SIZE"] == 0
