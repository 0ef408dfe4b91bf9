"""Columns that say what was found: sites, masks, and why something is not as wished."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks import found
from tests.passes.compiling import compiled


def test_sites_are_counted_by_what_is_known_of_their_masks() -> None:
    def function(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(8, 8, dtype=torch.bool).tril()
        x = F.scaled_dot_product_attention(q, q, q, attn_mask=causal)
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=causal)
        x = F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    run = compiled(function)
    run(torch.randn(1, 2, 8, 16), torch.rand(8, 8) > 0.1)
    columns = found.columns(run.reports)
    assert set(columns) == set(found.COLUMNS)
    assert (columns["graphs"], columns["sites"], columns["misses"]) == ("1", "4", "0")
    assert (columns["proved"], columns["dense"]) == ("3", "1")
    assert "causal (proved) x2" in columns["masks"]
    assert "none x1" in columns["masks"]
    assert columns["why"].startswith("mask: ")


def test_a_site_that_is_left_as_it_was_says_why() -> None:
    run = compiled(lambda q: F.scaled_dot_product_attention(q, q, q), lowerings=["sdpa_flash"])
    run(torch.randn(1, 2, 8, 16))
    columns = found.columns(run.reports)
    assert columns["lowerings"] == "untouched x1"
    assert columns["why"].startswith("sdpa_flash: ")


def test_a_miss_is_no_site_and_says_what_was_seen() -> None:
    run = compiled(lambda q: (q @ q.mT).square().softmax(-1) @ q)
    run(torch.randn(1, 2, 8, 16))
    columns = found.columns(run.reports)
    assert (columns["sites"], columns["misses"]) == ("0", "1")
    assert columns["why"]
    assert found.columns(()) == {name: "0" if name in found.COLUMNS[:5] else "" for name in found.COLUMNS}
