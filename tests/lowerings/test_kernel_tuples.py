from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.lowerings import kernel_tuples


class Pair(NamedTuple):
    one: Any
    other: Any


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("Pair(one=1, other=2)", False),
        ("Pair(**both)", False),
        ("Pair(one=1, **rest)", False),
        ("Pair(1, 2)", True),
        ("Pair(1, other=2)", True),
        ("Pair(one=1)", True),
        ("Pair(one=1, other=2, third=3)", True),
        ("Triple(1, 2, 3)", False),
    ],
)
def test_tuples_that_are_made_by_position_are_seen(source: str, is_found: bool, tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(source)
    assert kernel_tuples.made_by_position({"Pair": Pair}, file) == (["kernel.py:1 Pair"] if is_found else [])


def test_fields_that_nobody_reads_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text("pair.one + one.two")
    assert kernel_tuples.unread({"Pair": Pair}, file) == ["Pair.other"]
