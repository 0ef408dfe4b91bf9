from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plot_learning

ROWS = [
    {"way": "bfloat16", "seed": "0", "step_20": "4.0", "step_40": "3.0"},
    {"way": "bfloat16", "seed": "1", "step_20": "2.0", "step_40": "1.0"},
    {"way": "block", "seed": "0", "step_20": "5.0", "step_40": ""},
]


def test_a_curve_is_the_mean_of_all_seeds_where_each_has_a_loss() -> None:
    assert plot_learning.curves(ROWS) == {"bfloat16": [(20, 3.0), (40, 2.0)], "block": [(20, 5.0)]}


def test_others_are_held_against_bfloat16_where_both_have_a_loss() -> None:
    assert plot_learning.above({"bfloat16": [(20, 2.0)], "block": [(20, 2.5), (40, 1.0)]}) == {"block": [(20, 25.0)]}


@pytest.mark.parametrize("dark", [False, True])
def test_draws_a_picture(tmp_path: Path, dark: bool) -> None:
    pytest.importorskip("matplotlib", reason="drawing wants matplotlib: pip install -e '.[dev]'")
    plot_learning.draw(ROWS, tmp_path / "x.png", dark=dark)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing wants matplotlib: pip install -e '.[dev]'")
    with pytest.raises(ValueError, match="nothing was measured"):
        plot_learning.draw([], tmp_path / "x.png")
