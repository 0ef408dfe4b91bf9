"""The table of families: each has one row, in order, whatever ran when; what is wrong stands out."""

from __future__ import annotations

import torch

from tests.hf.linear_families import FAMILY
from tests.hf.linear_scenarios import SCENARIOS, Shown
from tests.hf.linear_table import BEGIN, DTYPES, END, with_row

_PAGE = f"before\n\n{BEGIN}\n{END}\n\nafter\n"


def _row(**changed: int) -> dict[tuple[str, torch.dtype], Shown]:
    good = {"found": 2, "wanted": 2, **changed}
    return {(name, dtype): Shown(**good, outputs=[3e-10], gradients=[2e-11]) for name in SCENARIOS for dtype in DTYPES}


def test_rows_are_in_order_and_replaced() -> None:
    page = with_row(_PAGE, FAMILY["bamba"], _row())
    page = with_row(page, FAMILY["qwen3_next"], _row())
    page = with_row(page, FAMILY["bamba"], _row(found=1))
    assert page.startswith("before\n")
    assert page.endswith("\n\nafter\n")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert [line.split(" ")[1] for line in rows] == ["family", "qwen3_next", "bamba"]
    assert "| 28 of 28 | 3e-10, 3e-10 |" in rows[1]
    assert "| 14 of 28 | **3e-10**, **3e-10** |" in rows[2]
