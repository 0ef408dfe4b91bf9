"""The table of errors of linear attention, of short calls on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks import linear_errors


@pytest.mark.parametrize("recurrence", linear_errors.RECURRENCES)
def test_a_row_for_each_quantity(recurrence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_errors, "STEPS", [(0.1, 1.0)])
    found = list(linear_errors.rows("cpu", [recurrence], ["float32"], [5], "linear_reference"))
    quantities = {row["quantity"] for row in found}
    assert {"out", "state", "grad of first"} < quantities
    assert len(quantities) == len(found)
    assert {row["lowering"] for row in found} == {"linear_reference"}
    assert {*found[0]} == {*linear_errors.COLUMNS}
    assert not any(map(linear_errors.is_off, found))


@pytest.mark.parametrize(
    ("lowering", "ratio", "off"),
    [
        ("linear_reference", "2.00", False),
        ("linear_reference", "2.01", True),
        ("linear_reference", "nan", True),
        ("", "1.00", True),
    ],
)
def test_rows_that_break_the_rule(lowering: str, ratio: str, off: bool) -> None:
    assert linear_errors.is_off({"lowering": lowering, "ratio": ratio}) == off
