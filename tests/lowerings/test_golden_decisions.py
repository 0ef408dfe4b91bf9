"""Decisions change on purpose only."""

from __future__ import annotations

import io
from pathlib import Path

from tests.lowerings import golden_decisions

TABLE = Path(__file__).with_name("golden_decisions.csv")


def test_decisions_are_those_of_the_table() -> None:
    file = io.StringIO()
    golden_decisions.write(file)
    now, before = file.getvalue().splitlines(), TABLE.read_text().splitlines()
    changed = sorted({line.split(",")[0] for line in {*now} ^ {*before}})
    assert not changed, f"if that is meant: python -m tests.lowerings.golden_decisions > {TABLE.name}"
    assert now == before


def test_every_optional_kernel_is_decided_on() -> None:
    """A machine with a version that is not taken would say nothing of the family."""
    header, *lines = (line.split(",") for line in TABLE.read_text().splitlines())
    for column, lowering in (("sm90_fa4", "fa4"), ("sm90_cudnn_frontend", "cudnn")):
        at = header.index(column)
        assert any(line[at].split()[0] == lowering for line in lines), column
