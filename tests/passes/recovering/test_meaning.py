"""Masks of whole attentions, proved: what they are said to be, and what is left unsaid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_compiler.spec.masks import MaskSpec
from tests.passes.compiling import compiled

B, S, D = 2, 5, 8
LOWEST = torch.finfo(torch.float32).min


def _proved(make: Callable[..., Tensor], *inputs: Tensor, keys: int = S) -> MaskSpec:
    """The mask of an attention with make(*inputs) for its mask; numbers are compared with eager's."""

    def function(q: Tensor, k: Tensor, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=make(*inputs))

    q, k = torch.randn(B, 1, S, D), torch.randn(B, 1, keys, D)
    run = compiled(function)
    torch.testing.assert_close(run(q, k, *inputs), function(q, k, *inputs))
    return run.site.spec.mask


def _square(f: Callable[[Tensor, Tensor], Tensor], n: int = S) -> Callable[..., Tensor]:
    return lambda *_: f(torch.arange(n)[:, None], torch.arange(n)[None, :])


PADDING = torch.tensor([[1] * S, [1] * (S - 2) + [0] * 2])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_square(lambda q, k: k <= q), "causal"),
        (_square(lambda q, k: ~(q < k)), "causal"),
        (_square(lambda q, k: torch.ones(S, S).tril() > 0), "causal"),
        (_square(lambda q, k: torch.ones(S, S).tril() != 0), "causal"),
        (_square(lambda q, k: ~(torch.tril(torch.ones(S, S)) == 0)), "causal"),
        (_square(lambda q, k: torch.ones(S, S).tril() >= 0.5), "causal"),
        (_square(lambda q, k: torch.full((S, S), LOWEST).triu(1)), "causal"),
        (_square(lambda q, k: torch.where(k <= q, 0.0, LOWEST)), "causal"),
        (_square(lambda q, k: (k <= q) & (q - k < 3)), "causal ∧ window (2 back)"),
        (_square(lambda q, k: (q - k).abs() <= 2), "window (2 back, 2 ahead)"),
        (_square(lambda q, k: (k >= q - 1) & (k <= q + 2)), "window (1 back, 2 ahead)"),
        (_square(lambda q, k: q // 2 == k // 2), "chunks of 2"),
        (_square(lambda q, k: (k <= q) & (q // 2 == k // 2)), "causal ∧ chunks of 2"),
    ],
)
def test_kinds_of_positions(make: Callable[..., Tensor], words: str) -> None:
    found = _proved(make)
    assert " ∧ ".join(kind.words for kind in found.kinds) == words


def test_key_padding() -> None:
    found = _proved(lambda m: m[:, None, None, :] != 0, PADDING)
    (kind,) = found.kinds
    assert kind.words.startswith("key padding ")
    assert found.dense is not None


def test_documents() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    found = _proved(lambda d: d[:, None, :, None] == d[:, None, None, :], ids)
    (kind,) = found.kinds
    assert kind.words.startswith("document ")


def test_keys_up_to_a_cache_position() -> None:
    found = _proved(lambda p: (torch.arange(8) <= p)[None, None, None, :], torch.tensor([3]), keys=8)
    (kind,) = found.kinds
    assert kind.words.startswith("keys up to ")


def test_a_tensor_beside_conditions_is_their_rest() -> None:
    unread = torch.rand(B, S, S) > 0.3
    mask = _proved(lambda x, m: (torch.ones(S, S).tril() > 0) & (m != 0)[:, None, None] & x[:, None], unread, PADDING)
    assert [kind.words for kind in mask.held] == ["causal", "key padding inputs_1[b, k]"]
    assert str(mask.reason).startswith("inputs_0 is an input of the graph, and holds an element for each query and key")
    assert mask.rest is not None
    assert mask.rest.formula == "inputs_0[b, q, k]"
    assert mask.dense is not None


def test_what_is_added_beside_leaves_no_rest_of_its_own() -> None:
    """The one tensor holds both."""
    mask = _proved(lambda x, m: x.masked_fill(m, -torch.inf).masked_fill(torch.ones(S, S).triu(1) > 0, -torch.inf),
                   torch.randn(S, S), torch.rand(S, S) > 0.8)  # fmt: skip
    assert [kind.words for kind in mask.held] == ["causal"]
    assert mask.is_partial
    assert mask.rest is None


def test_a_tensor_alone_is_no_rest() -> None:
    mask = _proved(lambda x: x & (torch.arange(S) >= 0), torch.rand(S, S) > 0.1)
    assert mask.kinds == ()
    assert mask.rest is None
    assert mask.reason is not None


def test_everything_is_no_mask() -> None:
    found = _proved(_square(lambda q, k: (k <= q) | (k > q)))
    assert found.words == "none"


def test_nothing_is_guessed_from_what_a_tensor_happens_to_hold() -> None:
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    found = _proved(lambda m: m & True, causal)
    assert not found.is_causal
    assert found.dense is not None


def test_a_mask_that_is_causal_but_for_one_pair_is_not_causal() -> None:
    found = _proved(_square(lambda q, k: (k <= q) | ((q == 1) & (k == 3))))
    assert not found.is_causal
    assert found.dense is not None


def test_a_bias_is_no_mask() -> None:
    found = _proved(_square(lambda q, k: (k - q) * 0.25))
    assert found.kinds == ()
    assert found.reason is None
    assert found.dense is not None


def test_a_mask_that_is_made_by_very_many_ops_is_left_dense() -> None:
    def make(x: Tensor) -> Tensor:
        for i in range(210):
            x = torch.where(torch.arange(S) == i, x, 0.0)
        return x

    found = _proved(make, torch.randn(1, S))
    assert found.kinds == ()
    assert found.reason is not None
    assert "in a row" in found.reason
    assert found.dense is not None
