"""The launches for gradients of what is added to the scores; their numbers are those of test_triton_launch.py's cases."""

from __future__ import annotations

import pytest

from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_launches import SIZES, launched
from tests.lowerings.kernel_problems import build


@pytest.mark.parametrize(
    ("axes", "grid"),
    [("bhqk", (5 * 17, 8, 3)), ("hqk", (5 * 17, 8, 1)), ("hq", (5, 8, 1)), ("bk", (17, 1, 3)), ("", (1, 1, 1))],
)
def test_the_gradient_of_a_bias_has_a_program_for_each_of_its_own_tiles(axes: str, grid: tuple[int, int, int]) -> None:
    problem = build(Case(name="grids_bias", **SIZES, bias=axes))  # type: ignore[arg-type]
    assert launched(problem)["attention_grad_bias"].grid == grid
