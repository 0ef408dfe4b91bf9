"""The word about packed sequences that a graph looks for and doesn't have."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from attn_compiler.reporting.facts import SiteReport
from tests.passes.compiling import compiled

Tensor = torch.Tensor
S = 6


def _documents(positions: Tensor) -> Tensor:
    """As transformers numbers them."""
    first = positions[:, :1] - 1
    return (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)


def _site(make: Callable[..., Tensor], *inputs: Tensor) -> SiteReport:
    def function(q: Tensor, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=make(*inputs))

    run = compiled(function)
    q = torch.randn(2, 2, S, 8)
    torch.testing.assert_close(run(q, *inputs), function(q, *inputs))
    return run.site


def _packed(position_ids: Tensor) -> Tensor:
    documents = _documents(position_ids)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & (position_ids[:, None, None, :] <= position_ids[:, None, :, None])


def test_positions_of_the_graph_are_one_document() -> None:
    def make() -> Tensor:
        position_ids = torch.arange(S).unsqueeze(0)
        return _packed(position_ids)

    site = _site(make)
    assert site.spec.mask.words == "causal (proved)"
    assert "document(cumsum…) ⇒ causal, because position_ids is arange" in site.notes


def test_positions_that_go_on_from_a_cache_are_too() -> None:
    def make(past: Tensor) -> Tensor:
        position_ids = (torch.arange(S) + past).unsqueeze(0)
        return _packed(position_ids)

    assert "document(cumsum…) ⇒ causal, because position_ids is arange" in _site(make, torch.tensor(3)).notes


def test_positions_of_the_user_are_not() -> None:
    site = _site(_packed, torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]))
    assert not any("arange" in note for note in site.notes)
    assert any("document" in kind.words for kind in site.spec.mask.read)


def test_another_running_count_has_no_word() -> None:
    def make() -> Tensor:
        positions = torch.ones(S, dtype=torch.int64).cumsum(0)
        return positions[None, :] <= positions[:, None]

    site = _site(make)
    assert site.spec.mask.is_causal
    assert not any("document" in note for note in site.notes)
