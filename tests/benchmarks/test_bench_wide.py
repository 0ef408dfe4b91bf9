"""What the benchmark of wide heads' backward counts, and which choices it tries."""

from __future__ import annotations

import csv
import dataclasses

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper import plan
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from benchmarks import bench_wide
from benchmarks.bench_wide import CASES, COLUMNS, RESULTS, VARIANTS
from tests.lowerings.kernel_cases import Case


def _counted(case: Case) -> int:
    """One pair after another."""
    found = 0
    for row in range(case.batch):
        padding = row * case.seqlen_kv // 2 if case.keys == "left" else 0
        for query in range(case.seqlen_q):
            right = case.seqlen_kv - 1 if case.band is None else query
            left = 0 if case.band is None or case.band.left is None else query - case.band.left
            found += max(right - max(left, padding) + 1, 0)
    return found * case.heads_q


@pytest.mark.parametrize(
    ("band", "keys"), [(None, None), (Band(right=0), None), (Band(left=4, right=0), None), (Band(right=0), "left")]
)
def test_allowed_pairs(band: Band | None, keys: str | None) -> None:
    case = Case(name="pairs", batch=2, seqlen_q=14, seqlen_kv=14, heads_q=3, band=band, keys=keys)
    assert bench_wide.pairs(case) == _counted(case)


def test_every_case_is_of_wide_heads_and_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(256 < case.head_dim <= 512 and case.needs_grad for case in CASES)
    assert all(bench_wide.pairs(case) > 0 for case in CASES)


def test_choices_differ_in_fields_that_there_are() -> None:
    fields = {field.name for field in dataclasses.fields(plan.WideGradBlocks)}
    assert all(set(given) <= fields for given in VARIANTS.values())
    assert next(iter(VARIANTS)) == "hopper"


def test_what_was_measured_has_the_columns_and_the_cases() -> None:
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert {row["case"] for row in rows} == {case.name for case in CASES}
    assert not any(row["failure"] for row in rows)
