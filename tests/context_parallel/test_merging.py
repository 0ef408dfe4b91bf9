"""Parts of an attention, put together, are the attention over all keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from attn_compiler.context_parallel.merging import merged

B, H, Q, D = 2, 3, 4, 5


def _attention(scores: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """A row of -inf gives 0."""
    logits = scores if sinks is None else torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.nan_to_num(logits.softmax(-1))[..., : scores.shape[-1]]
    return weights @ v


@given(
    parts=st.integers(1, 4), seed=st.integers(0, 999), masked=st.sampled_from([0.0, 0.5, 0.95]), has_sinks=st.booleans()
)
def test_parts_are_the_whole(parts: int, seed: int, masked: float, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    scores = 30 * random(B, H, Q, 3 * parts)
    scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < masked, -math.inf)
    v, sinks = random(B, H, 3 * parts, D), 10 * random(H) if has_sinks else None
    cut = list(zip(scores.chunk(parts, -1), v.chunk(parts, 2), strict=True))
    outs = torch.stack([_attention(s, x, None) for s, x in cut])
    lses = torch.stack([s.logsumexp(-1) for s, _ in cut])
    found = merged(outs, lses, sinks)
    torch.testing.assert_close(found, _attention(scores, v, sinks), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sinks", [None, torch.zeros(H)])
def test_rows_without_keys_give_nothing(sinks: Tensor | None) -> None:
    found = merged(torch.zeros(2, B, H, Q, D), torch.full((2, B, H, Q), -math.inf), sinks)
    assert found.equal(torch.zeros(B, H, Q, D))


def test_large_sums_do_not_overflow() -> None:
    lses = torch.tensor([1e4, 1e4 + 1.0]).view(2, 1, 1, 1)
    outs = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1, 1)
    assert merged(outs, lses).item() == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6)


def test_the_lowest_number_counts_for_nothing_beside_another_part() -> None:
    """A model that masks by adding the lowest number of its dtype leaves a rank with such sums."""
    lses = torch.tensor([torch.finfo(torch.float32).min, 0.0]).view(2, 1, 1, 1)
    outs = torch.tensor([3.0, 1.0]).view(2, 1, 1, 1, 1)
    assert merged(outs, lses).item() == 1.0
