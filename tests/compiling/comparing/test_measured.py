"""What is asked of a comparison's data."""

from __future__ import annotations

import pytest

from tests.compiling.comparing.test_comparison import made


def test_the_gain_is_our_ratio() -> None:
    assert made().gain == 2.0
    assert made(failure="ValueError: no").gain is None


def test_a_side_is_asked_for_by_its_name() -> None:
    found = made()
    assert found.side("inductor") is found.sides[1]
    with pytest.raises(StopIteration):
        found.side("nobody")
