"""Benchmarks of sites, built and random, their memory and peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attn_compiler.compiling.comparing.comparison import Comparison
from attn_compiler.compiling.comparing.sides import Side
from attn_compiler.reporting import doctor
from attn_compiler.reporting.report import Reports
from benchmarks import bench_sites, harness, random_sites
from benchmarks.bench_memory import COLUMNS as MEMORY_COLUMNS, row_of
from benchmarks.bench_sites import COLUMNS
from benchmarks.random_sites import LAYOUTS, Site

# Random sites are measured side by side, one that fails is a row, and the summary says how the choice stands.
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


# Each drawn site can be built and called, with gradients where it trains, in every layout and number of layers.
DRAWN = random_sites.sites(0, 320)


def _one_of_each() -> Iterator[Site]:
    """Of each mask, causal or not, the first site that trains and the first one that does not."""
    first = {(site.mask, site.causal, site.training): site for site in reversed(DRAWN)}
    yield from (first[key] for key in sorted(first))


EACH = list(_one_of_each())


@pytest.mark.parametrize("site", EACH, ids=lambda site: f"{site.mask}-{site.causal}-{site.training}")
def test_each_mask_is_built_and_has_gradients_where_it_trains(site: Site) -> None:
    built = random_sites.build(site.shortened, device="cpu", dtype=torch.float32)
    (out,) = built.call(*built.operands)
    assert out.shape == built.grad_out.shape
    kept = out if built.used is None else out.where(built.used, 0.0)
    assert bool(kept.isfinite().all())
    assert bool(built.leaves) is site.training
    if site.training:
        gradients = torch.autograd.grad(out, built.leaves, built.grad_out)
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_layouts_are_the_same_attention() -> None:
    """Of the same q, k and v, which only lie in memory in another way."""
    site = next(one for one in DRAWN if one.layout == "packed" and one.mask == "none" and not one.training).shortened
    built = random_sites.build(site, device="cpu", dtype=torch.float32)
    (expected,) = built.call(*built.operands)
    for layout in ("projected", "contiguous"):
        other = dataclasses.replace(site, layout=layout)
        parts = built.operands[0].chunk(3, dim=-1)
        if layout == "contiguous":
            parts = tuple(x.unflatten(-1, (-1, site.head_dim)).transpose(1, 2).contiguous() for x in parts)
        (out,) = random_sites.build(other, device="cpu", dtype=torch.float32).call(*parts)
        flat = out.transpose(1, 2).flatten(2) if layout == "contiguous" else out
        torch.testing.assert_close(flat, expected)


@pytest.mark.parametrize("site", EACH, ids=lambda site: f"{site.mask}-{site.causal}-{site.training}")
def test_layers_share_a_mask_but_not_what_each_learns(site: Site) -> None:
    """Each layer is the attention of its own operands."""
    one, three = (random_sites.build(site.shortened, device="cpu", dtype=torch.float32, layers=n) for n in (1, 3))
    has_own = site.mask in ("learned", "table")
    of_mask = len(one.operands) - (1 if site.layout == "packed" else 3)
    width = len(one.operands) - of_mask
    assert len(three.operands) == 3 * width + of_mask * (3 if has_own else 1)
    outs = three.call(*three.operands)
    masks = three.operands[3 * width :]
    for layer, out in enumerate(outs):
        mask = masks[layer * of_mask : (layer + 1) * of_mask] if has_own else masks
        (alone,) = one.call(*three.operands[layer * width : (layer + 1) * width], *mask)
        torch.testing.assert_close(out, alone, equal_nan=True)


# A seed draws the same sites everywhere, within bounds.
def test_a_seed_draws_the_same_and_another_one_others() -> None:
    assert random_sites.sites(0, 20) == DRAWN[:20]
    assert random_sites.sites(1, 20) != DRAWN[:20]


def test_sites_are_many_different_ones_within_bounds() -> None:
    assert len(set(DRAWN)) == len(DRAWN)
    assert all(site.flops <= random_sites.MOST_FLOPS and site.bytes <= random_sites.MOST_BYTES for site in DRAWN)
    assert {site.layout for site in DRAWN} == set(LAYOUTS)
    assert {32, 64, 128, 256} <= {site.head_dim for site in DRAWN}
    assert any(site.seqlen_q % 2 and site.seqlen_q > 49 for site in DRAWN)
    assert any(site.repeated for site in DRAWN)
    assert len({site.mask for site in DRAWN}) == 10


# Rows of `attn_compiler.compare`.
def _comparison(*sides: Side) -> Comparison:
    return Comparison(
        model="Model", inputs=(), training=False, modes="in eval()", settings={}, facts=doctor.machine_facts(),
        sides=sides, drew_random_numbers=False, reports=Reports([]),
    )  # fmt: skip


def test_a_row_has_memory_in_mib_and_nothing_for_what_is_not_known() -> None:
    ours = Side(name="attn_compiler", milliseconds=(1.0, 2.0, 3.0), ratio=1.5, held_bytes=2**20, peak_bytes=3 * 2**20)
    row = row_of(_comparison(Side(name="eager"), Side(name="inductor", failure="ValueError: no"), ours))
    assert row.keys() <= set(MEMORY_COLUMNS)
    assert (row["gain"], row["attn_compiler_p50_ms"]) == ("1.500", "2")
    assert (row["attn_compiler_held_mib"], row["attn_compiler_peak_mib"]) == ("1", "3")
    assert row["eager_p50_ms"] == row["inductor_peak_mib"] == row["attn_compiler_outputs_apart"] == ""
    assert row["failure"] == "inductor: ValueError: no"
