"""A seed draws the same sites everywhere, within bounds, and each can be built and called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from benchmarks import random_sites
from benchmarks.random_sites import LAYOUTS, Site

DRAWN = random_sites.sites(0, 320)


def _one_of_each() -> Iterator[Site]:
    """Of each mask, causal or not, the first site that trains and the first one that does not."""
    first = {(site.mask, site.causal, site.training): site for site in reversed(DRAWN)}
    yield from (first[key] for key in sorted(first))


EACH = list(_one_of_each())


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


@pytest.mark.parametrize("site", EACH, ids=lambda site: f"{site.mask}-{site.causal}-{site.training}")
def test_each_mask_is_built_and_has_gradients_where_it_trains(site: Site) -> None:
    built = random_sites.build(site.shortened, device="cpu", dtype=torch.float32)
    out = built.call(*built.operands)
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
    expected = built.call(*built.operands)
    for layout in ("projected", "contiguous"):
        other = dataclasses.replace(site, layout=layout)
        parts = built.operands[0].chunk(3, dim=-1)
        if layout == "contiguous":
            parts = tuple(x.unflatten(-1, (-1, site.head_dim)).transpose(1, 2).contiguous() for x in parts)
        out = random_sites.build(other, device="cpu", dtype=torch.float32).call(*parts)
        flat = out.transpose(1, 2).flatten(2) if layout == "contiguous" else out
        torch.testing.assert_close(flat, expected)
