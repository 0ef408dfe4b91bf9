"""The benchmark of biases and masks on Hopper: its sides, and the rows that it makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from attn_compiler.lowerings.choice import hopper_added
from attn_compiler.lowerings.hopper import plan
from benchmarks import added_cases, bench_added, harness
from benchmarks.added_cases import CASES
from benchmarks.bench_added import HOPPER, SIDES, TRITON, VARIANTS

BY_NAME = {case.name: case for case in CASES}


def test_a_form_is_of_the_head_dims_that_it_is_for() -> None:
    both = {name for name, blocks in VARIANTS.items() if 128 in blocks}
    assert set(bench_added.ours(BY_NAME["bias_d128_s2048"], SIDES)) == {TRITON, HOPPER, *both}
    assert set(bench_added.ours(BY_NAME["bias_d64_s2048"], SIDES)) == {TRITON, HOPPER, *VARIANTS}
    assert set(bench_added.ours(BY_NAME["bias_d256_s2048"], SIDES)) == {TRITON, HOPPER}
    assert set(bench_added.ours(BY_NAME["mask_holes_d64_s2048"], SIDES)) == {TRITON, HOPPER}
    assert set(bench_added.ours(BY_NAME["bias_causal_d128_s2048"], SIDES)) == {TRITON, HOPPER}
    wide = dataclasses.replace(BY_NAME["bias_d128_s2048"], wide=True)
    assert set(bench_added.ours(wide, SIDES)) == {TRITON, HOPPER, *both} - {"hopper, two stages"}


@pytest.mark.parametrize("side", VARIANTS)
def test_tiles_of_each_form_fit_shared_memory(side: str) -> None:
    for name in ("bias_d64_s2048", "bias_d128_s2048"):
        case = BY_NAME[name]
        blocks = bench_added.blocks_of(side, case)
        if blocks is None:
            continue
        qk = case.head_dim
        out = blocks.queries * qk
        elements = blocks.queries * blocks.query_stages * qk + 2 * blocks.stages * blocks.keys * qk
        elements += blocks.added_stages * blocks.queries * blocks.keys
        # Where there is no room for them outputs leave from the queries' place.
        assert 2 * elements <= 226 * 1024 or 2 * (elements + out) <= 226 * 1024


def test_the_forward_is_that_of_a_side() -> None:
    case = BY_NAME["bias_d128_s2048"]
    before = plan.ADDED
    with bench_added.taking("hopper, 64 keys", case):
        assert plan.ADDED[128].keys == 64
    with bench_added.taking(HOPPER, case):
        assert plan.ADDED is before
    assert plan.ADDED is before


def _row(case: str, which: str, side: str, tflops: str, error: str = "0.002") -> dict[str, str]:
    return {
        "case": case,
        "pass": which,
        "side": side,
        "tflops": tflops,
        "error": error,
        "date": "2026-11-26",
        "device": "NVIDIA H200",
    }


def test_rows_of_what_both_have_right_numbers_for(tmp_path: Path) -> None:
    measured = [
        _row("bias_d128_s2048", "forward", HOPPER, "500.0"),
        _row("bias_d128_s2048", "forward", TRITON, "370.0"),
        _row("t5_d64_s2048", "forward", HOPPER, "400.0", error="0.4"),
        _row("t5_d64_s2048", "forward", TRITON, "300.0"),
        _row("mask_holes_d64_s2048", "backward", HOPPER, "330.0"),
        _row("mask_holes_d64_s2048", "backward", TRITON, "300.0"),
        _row("mask_holes_d64_s2048", "forward", HOPPER, ""),
    ]
    path = tmp_path / "rows.csv"
    path.write_text(",".join(hopper_added.COLUMNS) + "\n")
    harness.replace_rows(path, hopper_added.COLUMNS, bench_added.rows_of(measured))
    assert path.read_text().splitlines() == [
        ",".join(hopper_added.COLUMNS),
        "bias,forward,65,128,2048,500.0,370.0,H200,2026-11-26,bias_d128_s2048",
        "mask,backward,1,64,2048,330.0,300.0,H200,2026-11-26,mask_holes_d64_s2048",
    ]


def test_a_table_says_which_side_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        _row("bias_d128_s2048", "forward", TRITON, "370.0") | {"chosen": "yes"},
        _row("bias_d128_s2048", "forward", HOPPER, "500.0"),
        {"case": "bias_d128_s2048", "side": "flex", "failure": "RuntimeError"},
    ]
    bench_added.print_table(rows, "forward")
    said = capsys.readouterr().out
    assert "370.0" in said
    assert "failed" in said


def test_sides_are_measured_in_both_passes() -> None:
    assert {case.part for case in CASES} == set(hopper_added.PARTS)
    assert max(plan.GRAD_BLOCKS) == max(case.head_dim for case in CASES if case.dense and case.head_dim < 256)
    assert added_cases.head_dims(BY_NAME["bias_d256_s2048"]) == (129, 256)
