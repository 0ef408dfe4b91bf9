"""What a lowering can get of what masks and biases read, seen in the specs of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from attn_compiler.spec.attention import AttentionSpec
from tests.passes.compiling import compiled, mark

PADDING = torch.tensor([[1] * 9 + [0] * 4, [1] * 13])


def _qkv(seqlen: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 2, seqlen, 8) for _ in range(3))
    return q, k, v


def _spec(function: Callable[..., Any], *args: Tensor) -> AttentionSpec:
    run = compiled(function)
    torch.testing.assert_close(run(*args), function(*args))
    return run.site.spec


def test_an_input_is_at_hand() -> None:
    spec = _spec(lambda q, k, v, p: sdpa(q, k, v, attn_mask=p[:, None, None, :].bool()), *_qkv(), PADDING)
    assert spec.mask.words.startswith("key padding p[b, k]")
    assert spec.mask.out_of_reach == ()


def test_what_the_caller_of_a_checkpoint_made_a_mask_of_is_at_hand() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        mask = p.bool()[:, None, None, :]
        return checkpoint(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, mask, use_reentrant=False)

    q, k, v = _qkv()
    spec = _spec(model, q.requires_grad_(), k, v, PADDING)
    assert spec.mask.words.startswith("key padding p[b, k]")
    assert spec.mask.out_of_reach == ()


def test_what_the_caller_of_two_checkpoints_within_each_other_made_a_mask_of_is_not() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        mask = p.bool()[:, None, None, :]

        def outer(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
            return checkpoint(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, m, use_reentrant=False)

        return checkpoint(outer, q, k, v, mask, use_reentrant=False)

    q, k, v = _qkv()
    spec = _spec(model, q.requires_grad_(), k, v, PADDING)
    assert spec.mask.words.startswith("key padding p[b, k]")
    assert spec.mask.out_of_reach == ("p",)


def test_a_tensor_that_is_written_to_later_is_at_hand_as_a_copy() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        mask = p.bool()[:, None, None, :]
        p.zero_()
        return sdpa(q, k, v, attn_mask=mask)

    run = compiled(model)
    given = _qkv()
    torch.testing.assert_close(run(*given, PADDING.clone()), model(*given, PADDING.clone()))
    assert run.site.spec.mask.words.startswith("key padding p[b, k]")
    assert run.site.spec.mask.out_of_reach == ()
    # Nothing was copied for a lowering that does not read it.
    assert "clone" not in run.calls


def test_a_learned_table_is_at_hand() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        distance = torch.arange(13)[None] - torch.arange(13)[:, None]
        return sdpa(q, k, v, attn_mask=table[distance + 12].permute(2, 0, 1)[None])

    spec = _spec(model, *_qkv(), torch.randn(25, 2).requires_grad_())
    assert spec.score.proved
    assert spec.score.out_of_reach == ()


def test_a_size_that_an_input_has_is_at_hand() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
        mask = torch.arange(k.shape[2])[None] <= torch.arange(q.shape[2])[:, None] + past.shape[0]
        return sdpa(q, k, v, attn_mask=mask)

    q, k, v = (mark(torch.randn(2, 2, n, 8), [n]) for n in (13, 29, 29))
    spec = _spec(model, q, k, v, mark(torch.randn(7), [7]))
    assert "causal from s" in spec.mask.words
    assert spec.mask.out_of_reach == ()
