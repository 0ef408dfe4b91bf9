"""The benchmark of tables' gradients, of small sites on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_tables


@pytest.mark.parametrize("mask", ["buckets", "table"])
def test_a_row_for_each_side(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_tables, "_ROUNDS", 1)
    monkeypatch.setattr(
        bench_tables,
        "SIDES",
        {"eager": None, "math": {"backend": "attn_compiler", "options": {"lowerings": ["math"], "inner": "aot_eager"}}},
    )
    eager, ours = bench_tables.rows("cpu", [torch.float32], {mask: [(2, 3, 9, 8)]})
    assert (eager["lowering"], ours["lowering"], ours.get("failure")) == ("", "math", None)
    assert float(ours["error"]) < 1e-5
    assert float(ours["differs"]) == 0
    assert set(ours) <= {*bench_tables.COLUMNS}


@pytest.mark.parametrize(
    ("side", "of_eager", "differs", "off"),
    [
        ("triton", "1.9", "0", False),
        ("triton", "2.1", "0", True),
        ("triton", "1", "1e-3", True),
        ("inductor", "9", "1", False),
    ],
)
def test_what_breaks_the_rule(side: str, of_eager: str, differs: str, off: bool) -> None:
    assert bench_tables.is_off({"side": side, "of_eager": of_eager, "differs": differs}) == off


def test_a_side_that_fails_is_a_row() -> None:
    broken = {"broken": {"backend": "no such backend"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_tables, "SIDES", broken)
        (row,) = bench_tables.rows("cpu", [torch.float32], {"table": [(1, 1, 4, 8)]})
    assert "no such backend" in row["failure"]
