"""Each drawn site can be built and called, with gradients where it trains, in every layout and number of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from benchmarks import built_sites, random_sites
from benchmarks.random_sites import Site

DRAWN = random_sites.sites(0, 320)


def _one_of_each() -> Iterator[Site]:
    """Of each mask, causal or not, the first site that trains and the first one that does not."""
    first = {(site.mask, site.causal, site.training): site for site in reversed(DRAWN)}
    yield from (first[key] for key in sorted(first))


EACH = list(_one_of_each())


@pytest.mark.parametrize("site", EACH, ids=lambda site: f"{site.mask}-{site.causal}-{site.training}")
def test_each_mask_is_built_and_has_gradients_where_it_trains(site: Site) -> None:
    built = built_sites.build(site.shortened, device="cpu", dtype=torch.float32)
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
    built = built_sites.build(site, device="cpu", dtype=torch.float32)
    (expected,) = built.call(*built.operands)
    for layout in ("projected", "contiguous"):
        other = dataclasses.replace(site, layout=layout)
        parts = built.operands[0].chunk(3, dim=-1)
        if layout == "contiguous":
            parts = tuple(x.unflatten(-1, (-1, site.head_dim)).transpose(1, 2).contiguous() for x in parts)
        (out,) = built_sites.build(other, device="cpu", dtype=torch.float32).call(*parts)
        flat = out.transpose(1, 2).flatten(2) if layout == "contiguous" else out
        torch.testing.assert_close(flat, expected)


@pytest.mark.parametrize("site", EACH, ids=lambda site: f"{site.mask}-{site.causal}-{site.training}")
def test_layers_share_a_mask_but_not_what_each_learns(site: Site) -> None:
    """Each layer is the attention of its own operands."""
    one, three = (built_sites.build(site.shortened, device="cpu", dtype=torch.float32, layers=n) for n in (1, 3))
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
