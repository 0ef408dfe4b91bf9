"""The table of releases: of each family and pair of versions a row, and cards from what benchmarks wrote."""

from __future__ import annotations

import pytest

from attn_compiler.lowerings.shared.limits.triton_releases import COMPILED
from website import triton_table


def test_each_release_has_a_row_for_each_family() -> None:
    rows = triton_table.table_rows()
    assert {(row[1], row[2]) for row in rows} == {
        (f"{major}.{minor}", f"`{lowering}`") for lowering, releases in COMPILED.items() for major, minor in releases
    }
    assert len({tuple(row[:3]) for row in rows}) == len(rows)


@pytest.mark.parametrize("lowering", COMPILED)
def test_what_ran_on_a_gpu_is_read_off_benchmarks(lowering: str) -> None:
    assert "H200" in triton_table.on_gpus()[(2, 11), (3, 6), lowering]


@pytest.mark.parametrize(
    ("file", "row", "lowerings"),
    [
        ("h200.csv", {"lowerings": "triton x8 + sdpa_cudnn x4"}, ["triton"]),
        ("x.csv", {"side": "triton_fp8"}, ["triton_fp8"]),
        ("x.csv", {"side": "rule"}, []),
        ("decode_h200.csv", {"side": "rule"}, ["decode"]),
        ("x.csv", {"lowering": "fa4", "side": None}, []),
    ],
)
def test_whose_kernels_a_row_ran(file: str, row: dict[str, str], lowerings: list[str]) -> None:
    assert list(triton_table._lowerings_of(file, row)) == lowerings


@pytest.mark.parametrize(
    ("lowering", "tested", "said"),
    [
        ("triton", ("12", "0"), "12 tests"),
        ("triton", ("11", "1"), "1 of 12 tests failed"),
        ("triton", None, "–"),
        ("hopper", None, "has no interpreter"),
    ],
)
def test_what_is_said_of_the_interpreter(lowering: str, tested: tuple[str, str] | None, said: str) -> None:
    assert triton_table._said(lowering, tested) == said
