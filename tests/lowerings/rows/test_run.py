"""What the leaf op computes piece by piece, held against attention with the whole mask in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.rows import run
from attn_compiler.lowerings.rows.pieces import operand_names
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import Causal, Dense, KeyPadding, MaskSpec
from attn_compiler.spec.scores import ScoreSpec

BATCH, HEADS, HEADS_KV, SEQLEN, HEAD_DIM = 4, 4, 2, 37, 8
PADDING = KeyPadding(condition=ix.as_bool(Load("kept", (Index("b"), Index("k")), "int")))


@dataclass(frozen=True, kw_only=True)
class Built:
    """allowed: bool (B, Sq, Skv)."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    allowed: Tensor
    text: str


def built(*, causal: bool, dtype: torch.dtype = torch.float32) -> Built:
    """Padding on the right, on the left, none, and a gap."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, HEADS, SEQLEN, HEAD_DIM), *[(BATCH, HEADS_KV, SEQLEN, HEAD_DIM)] * 2)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    at = torch.arange(SEQLEN)
    keys = torch.stack((at < 20, at >= 11, at >= 0, (at < 5) | (at > 9)))
    allowed = keys[:, None, :].expand(BATCH, SEQLEN, SEQLEN)
    allowed = allowed & (at[:, None] >= at) if causal else allowed
    kinds = (Causal(), PADDING) if causal else (PADDING,)
    tensors = [
        TensorSpec(shape=tuple(x.shape), strides=x.stride(), dtype=str(dtype).removeprefix("torch.")) for x in (q, k, v)
    ]
    spec = AttentionSpec(
        q=tensors[0],
        k=tensors[1],
        v=tensors[2],
        mask=MaskSpec(kinds=kinds, dense=Dense(shape=(BATCH, 1, SEQLEN, SEQLEN), dtype="bool")),
        score=ScoreSpec(scale=0.3),
        device="cpu",
        out_dtype=tensors[0].dtype,
        needs_grad=True,
    )
    assert operand_names(spec) == ("keys",)
    return Built(q=q, k=k, v=v, keys=keys, allowed=allowed, text=spec.to_text())


def exact(given: Built) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse, and the gradients of q, k and v by the sum of out."""
    q, k, v = (x.double().requires_grad_() for x in (given.q, given.k, given.v))
    wide_k, wide_v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    scores = (q @ wide_k.mT * 0.3).masked_fill(~given.allowed[:, None], -torch.inf)
    has_key = given.allowed.any(-1)[:, None, :, None]
    out = scores.masked_fill(~has_key, 0.0).softmax(-1).masked_fill(~has_key, 0.0) @ wide_v
    return out.detach(), scores.logsumexp(-1).detach(), list(torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_outputs_and_gradients(dtype: torch.dtype, atol: float, causal: bool) -> None:
    given = built(causal=causal, dtype=dtype)
    out, lse = run.forward(given.q, given.k, given.v, [given.keys], given.text)
    expected_out, expected_lse, expected = exact(given)
    assert (out.dtype, lse.shape) == (dtype, given.q.shape[:3])
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out.double(), expected_out, atol=atol, rtol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, atol=max(atol, 1e-6), rtol=1e-6)
    tensors = (torch.ones_like(out), torch.zeros_like(lse), given.q, given.k, given.v)
    *grads, further = run.backward(*tensors, [given.keys], out, lse, given.text)
    assert further == []
    for found, right in zip(grads, expected, strict=True):
        assert found.dtype == dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), right, atol=20 * atol, rtol=20 * atol)


def test_what_is_left_out_is_not_read() -> None:
    """NaN in padding reaches neither outputs nor gradients."""
    given = built(causal=True)
    hidden = ~given.keys
    # In the row with a gap the kernel reads what it masks.
    hidden[3] = False
    for x in (given.k, given.v):
        x.masked_fill_(hidden[:, None, :, None], torch.nan)
    out, lse = run.forward(given.q, given.k, given.v, [given.keys], given.text)
    *grads, _ = run.backward(
        torch.ones_like(out), torch.zeros_like(lse), given.q, given.k, given.v, [given.keys], out, lse, given.text
    )
    assert not any(x.isnan().any() for x in (out, lse, *grads))


def test_a_query_without_keys_is_zero() -> None:
    given = built(causal=True)
    out, lse = run.forward(given.q, given.k, given.v, [given.keys], given.text)
    without = ~given.allowed.any(-1)
    assert without.any()
    assert out.transpose(1, 2)[without].abs().max() == 0
    assert (lse.transpose(1, 2)[without] == -torch.inf).all()
