"""The benchmark of backwards in one order: its rows, of sides that are ordinary functions."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.choice import in_order
from attn_compiler.spec.target import Target
from benchmarks import bench_in_order, bench_kernels, kernel_cases
from benchmarks.bench_in_order import ANY_ORDER, IN_ORDER, TRITON
from benchmarks.bench_kernels import Timed

CASE = bench_in_order.CASES[0]


def _side(results: Any) -> Timed:
    return Timed(prepare=lambda: None, run=lambda _: (next(results),))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Timed]:
    """The sides of a case, on a machine that is not there."""
    ones = torch.ones(4)
    same: itertools.repeat[Tensor] = itertools.repeat(ones)
    sides = {IN_ORDER: _side(same), TRITON: _side(same), f"{IN_ORDER}, 4 at once": _side(same)}
    sides[ANY_ORDER] = _side(ones + i * 1e-6 for i in itertools.count())
    problem = kernel_cases.build(CASE.small, device="cpu", dtype=torch.float32, training=True)
    built = bench_in_order.Built(problem=problem, hopper=[], grad_hopper=[], heads=32)

    def sides_of(built: Any, heads: Any, said: dict[str, str]) -> dict[str, Timed]:
        said["cudnn"] = "ImportError: no frontend"
        return sides

    monkeypatch.setattr(bench_in_order, "build", lambda case, device: built)
    monkeypatch.setattr(bench_in_order, "sides_of", sides_of)
    monkeypatch.setattr(Target, "current", lambda device: Target.fake(deterministic=True))
    return sides


def _rows() -> dict[str, dict[str, str]]:
    return {row["side"]: row for row in bench_in_order.measure(CASE, [4], device="cpu", seconds=0.001)}


def test_each_side_has_a_row_that_says_whether_runs_are_alike(made: dict[str, Timed]) -> None:
    rows = _rows()
    assert set(rows) == {*made, "cudnn"}
    assert {name: row.get("same") for name, row in rows.items()} == {
        IN_ORDER: "yes", TRITON: "yes", f"{IN_ORDER}, 4 at once": "yes", ANY_ORDER: "no", "cudnn": None,
    }  # fmt: skip
    assert rows["cudnn"]["failure"] == "ImportError: no frontend"
    assert (rows[IN_ORDER]["heads_at_once"], rows[f"{IN_ORDER}, 4 at once"]["heads_at_once"]) == ("32", "4")
    assert set().union(*rows.values()) <= set(bench_in_order.COLUMNS)
    assert bench_in_order.failures(list(rows.values())) == 0
    # Of the small problem: with so few positions the Triton kernels' is taken.
    assert [name for name, row in rows.items() if row.get("chosen")] == [TRITON]
    bench_in_order.print_table(list(rows.values()))


def test_other_bits_wrong_numbers_and_failures_of_ours_are_told(made: dict[str, Timed]) -> None:
    made[IN_ORDER] = _side(torch.ones(4) + i * 1e-6 for i in itertools.count())
    assert bench_in_order.failures(list(_rows().values())) == 1
    made[IN_ORDER] = _side(itertools.repeat(torch.ones(4) * (1 + 2 * bench_kernels.MAX_ERROR)))
    assert bench_in_order.failures(list(_rows().values())) == 1
    made[IN_ORDER] = Timed(prepare=lambda: None, run=lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    (row,) = bench_in_order.measure(CASE, [], device="cpu", seconds=0.001)
    assert "division" in row["failure"]
    assert bench_in_order.failures([row]) == 1


def test_what_was_measured_becomes_rows_that_decide(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    old = ["causal", "causal", "97", "128", "8192", "32", "423", "368", "2026-11-24"]
    lines = [",".join(in_order.TABLE.columns), ",".join([*old, CASE.name]), ",".join([*old, "another"])]
    path.write_text("\n".join(lines) + "\n")
    measured = [
        {
            "case": name,
            "side": side,
            "seqlen": "8192",
            "heads_at_once": "32",
            "tflops": tflops,
            "same": same,
            "date": "d",
        }
        for name, side, tflops, same in (
            (CASE.name, IN_ORDER, "430", "yes"),
            (CASE.name, TRITON, "360", "yes"),
            ("softcap_d128_s8192", IN_ORDER, "390", "yes"),
            ("softcap_d128_s8192", TRITON, "330", "yes"),
            ("softcap_d128_s8192", f"{IN_ORDER}, 32 at once", "500", "no"),
            ("window_d128_s8192", IN_ORDER, "310", "yes"),
        )
    ]
    bench_in_order.write_rows(path, measured)
    assert path.read_text().splitlines()[1:] == [
        lines[2],
        f"causal,causal,97,128,8192,32,430,360,d,{CASE.name}",
        "causal,causal,97,128,8192,32,390,330,d,softcap_d128_s8192",
    ]
