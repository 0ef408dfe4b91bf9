"""Random sites are measured side by side, one that fails is a row, and the summary says how the choice stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bench_sites, harness, random_sites
from benchmarks.bench_sites import COLUMNS

SITES = random_sites.sites(0, 3)


def _rows(number: int, **times: float) -> list[dict[str, str]]:
    base = dict.fromkeys(COLUMNS, "") | SITES[number].columns | {"number": str(number)}
    return [
        base
        | {"side": side, "us_p50": str(took), "chosen": "yes" if side == "attn_compiler" else "", "lowering": "triton"}
        for side, took in times.items()
    ]


def test_the_summary_counts_what_is_near_the_best_and_what_is_slower_than_inductor() -> None:
    rows = [
        *_rows(0, inductor=100.0, attn_compiler=101.0, hopper=99.0),
        *_rows(1, inductor=100.0, attn_compiler=80.0, hopper=40.0),
        *_rows(2, inductor=100.0, attn_compiler=130.0),
    ]
    said = bench_sites.summary(rows)
    assert "3 sites, 3 of them with a time" in said
    assert "chosen / best <= 1.03: 1 of 3, 33.3%" in said
    assert "beyond 1.02: 1" in said
    worst = [line for line in said.splitlines() if " µs, " in line]
    assert "2.000 of the best (hopper), 0.800 of Inductor's" in worst[0]
    assert "1.300 of Inductor's" in worst[1]


def test_the_summary_names_what_failed_or_is_wrong() -> None:
    failed = {**_rows(0, attn_compiler=1.0)[0], "us_p50": "", "failure": "its process died"}
    wrong = {**_rows(1, attn_compiler=1.0)[0], "numerics": "WRONG", "error": "0.5"}
    said = bench_sites.summary([failed, wrong])
    assert "2 sites, 1 of them with a time" in said
    assert "attn_compiler: its process died" in said
    assert "attn_compiler: WRONG 0.5" in said
    assert bench_sites.summary([]) == "0 sites, 0 of them with a time of the choice"


@pytest.mark.further
def test_every_side_of_small_sites_has_a_row_and_a_later_run_adds_others(tmp_path: Path) -> None:
    path = tmp_path / "sites.csv"
    small = ["--size", "small", "--device", "cpu", "--inner", "eager", "--seconds", "0.01", "--output", str(path)]
    assert bench_sites.main([*small, "--count", "1", "--forced", "math"]) == 0
    assert bench_sites.main([*small, "--count", "3", "--part", "1", "2", "--forced", "--append"]) == 0
    found = harness.read(path)
    assert {row["number"] for row in found} == {"0", "1"}
    assert [row["side"] for row in found if row["number"] == "0"] == ["inductor", "attn_compiler", "math"]
    assert [row["side"] for row in found if row["number"] == "1"] == ["inductor", "attn_compiler"]
    assert all(float(row["us_p50"]) > 0 and not row["failure"] for row in found)
    assert all(row["numerics"] == "ok" for row in found if row["side"] != "inductor")
