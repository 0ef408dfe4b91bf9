"""The launches for gradients of what is added to the scores; their numbers are those of test_triton_launch.py's cases."""

from __future__ import annotations

import pytest

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
        ("bhqk", (2 * (4 + 4 * 17), 8 * 3, 1)),
        ("hqk", (2 * (4 * 3 + 4 * 17), 8, 1)),
        ("bqk", (2 * (4 * 8 + 4 * 17), 3, 1)),
        ("qk", (2 * (4 * 24 + 4 * 17), 1, 1)),
    ],
)
def test_a_bias_of_both_axes_gets_its_gradient_in_the_launch_of_dq(axes: str, grid: tuple[int, int, int]) -> None:
    problem = build(Case(name="grids_bias", **SIZES, bias=axes))  # type: ignore[arg-type]
    found = launched(problem)
    assert found["attention_grad_q_kept"].grid == grid
    assert "attention_grad_bias" not in found
