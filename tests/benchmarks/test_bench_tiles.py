"""Tiles are varied and measured one by one (Triton in its interpreter)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from attn_compiler.lowerings.base import Tile, Tiles
from benchmarks import bench_tiles, harness
from benchmarks.bench_tiles import KERNELS, neighbours, row, tiles_with
from benchmarks.kernel_cases import CASES

BY_NAME = {case.name: case for case in CASES}
TILE = Tile(queries=64, keys=128, warps=8, stages=3)
TABLE = Tiles(forward=TILE, grad_q=TILE, grad_kv=TILE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_neighbours_differ_and_the_first_is_the_tile(kernel: str) -> None:
    found = neighbours(dataclasses.replace(TILE, warps=4), kernel)
    assert found[0].warps == 4
    assert len(set(found)) == len(found)
    assert any(tile.apart for tile in found) is (kernel == "dkv")


def test_forward_and_dq_visit_the_same_lists() -> None:
    small = dataclasses.replace(TILE, queries=32, keys=32)
    for kernel in ("forward", "dq"):
        tiles = tiles_with(TABLE, kernel, small)
        assert (tiles.forward.queries, tiles.forward.keys) == (tiles.grad_q.queries, tiles.grad_q.keys) == (32, 32)
        assert tiles.grad_kv == TILE
    assert tiles_with(TABLE, "dkv", small) == dataclasses.replace(TABLE, grad_kv=small)


def test_a_row_counts_allowed_pairs() -> None:
    case = BY_NAME["causal_d128_s8192"]
    found = row(case, "dkv", dataclasses.replace(TILE, apart=True), 2000.0)
    assert (found["case"], found["shape"]) == ("dkv causal_d128_s8192 apart", "B2 S8192 D128, H 16")
    assert float(found["tflops"]) == pytest.approx(2 * 4 * case.pairs * 16 * 128 / 2000.0 / 1e6, abs=0.05)


@pytest.mark.further
def test_each_kernel_is_measured_alone_and_a_later_run_is_added(tmp_path: Path) -> None:
    path = tmp_path / "tiles.csv"
    given = ["--size", "small", "--device", "cpu", "--cases", "padding_right", "--seconds", "0", "--output", str(path)]
    assert bench_tiles.main([*given, "--tiles", "32x32 w4 s1", "64x32 w4 s1"]) == 0
    assert bench_tiles.main([*given, "--kernels", "forward", "--tiles", "32x32 w4 s1"]) == 0
    found = [(one["run"], one["case"], one["tile_queries"]) for one in harness.read(path)]
    first = [("1", f"{kernel} padding_right", queries) for kernel in KERNELS for queries in ("32", "64")]
    assert found == [*first, ("2", "forward padding_right", "32")]
    assert all(float(one["us_p50"]) > 0 for one in harness.read(path))
