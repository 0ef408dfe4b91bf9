"""A small fixed budget of the fuzzer: nothing goes wrong, and what it draws is attention that gets lowered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz.grammar.rules import RULES

#: programs of each rule
EACH = (1, pytest.param(4, marks=pytest.mark.slow))


@pytest.mark.further
@pytest.mark.parametrize("each", EACH)
def test_nothing_goes_wrong(each: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = [
        "--programs",
        str(each * len(RULES)),
        "--batch",
        str(each),
        "--seed",
        "17",
        "--processes",
        "1",
        "--minutes",
        "60",
    ]
    code = fuzz.main([*options, "--out", str(tmp_path / "found"), "--report", str(report)])
    tally = json.loads(report.read_text())
    found = "\n".join(path.read_text() for path in (tmp_path / "found").glob("*.py")) if code else ""
    assert code == 0, found
    assert tally["rules"].keys() == RULES.keys()
    assert tally["different"] == tally["total"]["programs"] > 0.8 * each * len(RULES)
    lowered = tally["lowered"]
    assert sum(lowered.values()) > 20, lowered
    assert min(lowered.get(name, 0) for name in ("sdpa_cpu_flash", "reference", "math")) >= each, lowered
    assert tally["total"]["compared"] > 0.6 * tally["total"]["programs"], tally["total"]
