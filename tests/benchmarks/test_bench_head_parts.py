"""The benchmark of head dims as sums of powers of two: its sides, and its rows, of sides that are ordinary functions."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from attn_compiler.lowerings.choice import head_parts
from attn_compiler.lowerings.hopper import plan
from benchmarks import bench_head_parts, bench_kernels, kernel_cases, select_cases
from benchmarks.bench_head_parts import CASES, PADDED, SIDES, SUMMED
from benchmarks.bench_kernels import Timed
from benchmarks.kernel_cases import Case

BY_NAME = {case.name: case for case in CASES}
CASE = BY_NAME["causal_d80_s8192"]


def _sides(case: Case) -> dict[str, tuple[int, int]]:
    """What each side of a case multiplies."""
    spec = select_cases.spec_of(case, training=False)
    found = {}
    for side in SIDES:
        if bench_head_parts.products(side, spec) is not None:
            with bench_head_parts.taking(side, spec):
                found[side] = plan.multiplied(spec)
                assert found[side] == bench_head_parts.products(side, spec)
    return found


def test_each_side_has_products_of_its_own() -> None:
    assert _sides(CASE) == {
        "padded": (128, 128), "summed": (80, 80), "summed keys": (80, 128), "summed, overlapping": (80, 80),
        "summed by 32": (96, 96), "summed, three": (80, 80),
    }  # fmt: skip
    assert set(_sides(BY_NAME["causal_d96_s8192"])) == set(SIDES) - {"summed by 32"}
    assert _sides(BY_NAME["causal_d128_s8192"]) == {"padded": (128, 128)}
    assert _sides(BY_NAME["causal_d192_128_s8192"]) == {"padded": (256, 128), "summed": (192, 128)}


def test_three_warpgroups_have_room_in_shared_memory() -> None:
    for case in (CASE, BY_NAME["causal_d96_s8192"]):
        spec = select_cases.spec_of(case, training=False)
        with bench_head_parts.taking(bench_head_parts.THREE, spec):
            assert plan.blocks_of(spec).queries == 192
            assert not plan.leaves_from_queries(spec)


def test_one_side_overlaps() -> None:
    spec = select_cases.spec_of(CASE, training=False)
    for side in _sides(CASE):
        with bench_head_parts.taking(side, spec):
            assert plan.blocks_of(spec).overlaps is (side == bench_head_parts.OVERLAPPING)


def test_cases_are_of_every_kind_head_dim_and_length() -> None:
    assert len(BY_NAME) == len(CASES) == 210
    assert {case.head_dim for case in CASES} == {72, 80, 96, 112, 128, 192}
    assert all(case.batch * case.seqlen == 16384 for case in CASES)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Timed]:
    """The sides of a case, on a machine that is not there."""
    small = CASE.small
    problem = kernel_cases.build(small, device="cpu", dtype=torch.float32, training=False)
    built = bench_head_parts.Built(problem=problem, operands={})
    shape = (small.batch, small.heads_q, small.seqlen, small.head_dim_v)
    sides = {name: _side(torch.ones(shape)) for name in SIDES}
    monkeypatch.setattr(bench_head_parts, "build", lambda case, device, names: built)
    monkeypatch.setattr(bench_head_parts, "sides_of", lambda built: sides)
    monkeypatch.setattr(bench_head_parts.kernel_cases, "used_queries", lambda case: torch.ones(1, 1, 1, 1, dtype=bool))
    return sides


def _side(out: torch.Tensor) -> Timed:
    results = itertools.repeat(out)
    return Timed(prepare=lambda: None, run=lambda _: (next(results),))


def _rows() -> dict[str, dict[str, str]]:
    return {row["side"]: row for row in bench_head_parts.measure(CASE, device="cpu", seconds=0.001)}


def test_each_side_has_a_row(made: dict[str, Timed]) -> None:
    rows = _rows()
    assert set(rows) == set(SIDES)
    assert set().union(*rows.values()) <= set(bench_head_parts.COLUMNS)
    assert all(float(row["tflops"]) > 0 and float(row["error"]) == 0 for row in rows.values())
    assert bench_head_parts.failures(list(rows.values())) == 0
    bench_head_parts.print_table(list(rows.values()))


def test_wrong_numbers_and_failures_are_told(made: dict[str, Timed]) -> None:
    right = made[PADDED].run(None)[0]
    made[SUMMED] = _side(right * (1 + 2 * bench_kernels.MAX_ERROR))
    assert bench_head_parts.failures(list(_rows().values())) == 1
    made[SUMMED] = Timed(prepare=lambda: None, run=lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    (row,) = bench_head_parts.measure(CASE, device="cpu", seconds=0.001)
    assert "division" in row["failure"]
    assert bench_head_parts.failures([row]) == 1
    bench_head_parts.print_table([row])


def test_what_was_measured_becomes_rows_that_decide(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    old = "causal,causal,80,80,8192,1,2,2026-11-24"
    lines = [",".join(head_parts.COLUMNS), f"{old},{CASE.name}", f"{old},another"]
    path.write_text("\n".join(lines) + "\n")

    def measured(name: str, side: str, tflops: str, error: str = "0.01") -> dict[str, str]:
        return {"case": name, "side": side, "tflops": tflops, "error": error, "date": "d"}

    bench_head_parts.write_rows(
        path,
        [
            measured(CASE.name, SUMMED, "500.0"),
            measured(CASE.name, PADDED, "447.0"),
            measured("padded_causal_d72_s2048", PADDED, "350.0"),
            measured("padded_causal_d72_s2048", SUMMED, "390.0"),
            measured("full_d96_s2048", SUMMED, "390.0"),
            measured("full_d112_s2048", PADDED, "390.0"),
            measured("full_d112_s2048", SUMMED, "590.0", "0.5"),
        ],
    )
    assert path.read_text().splitlines()[1:] == [
        lines[2],
        f"causal,causal,80,80,8192,500.0,447.0,d,{CASE.name}",
        "padding,causal,80,80,2048,390.0,350.0,d,padded_causal_d72_s2048",
    ]
