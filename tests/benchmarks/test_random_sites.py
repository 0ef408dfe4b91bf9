"""A seed draws the same sites everywhere, within bounds."""

from __future__ import annotations

from benchmarks import random_sites
from benchmarks.random_sites import LAYOUTS

DRAWN = random_sites.sites(0, 320)


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
