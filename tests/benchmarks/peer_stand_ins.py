"""Stand-ins for flash_attn.cute and cudnn.flex_attention: what their functions compute, by definition and on any device."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Of (S, H, D), where mask (S, S) is true; zero for a query without a key."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    used = mask.any(1)
    scores = scores.masked_fill(~(mask | ~used[:, None]), -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1) * used[:, None], v)


def _band(length: int, causal: bool, window: tuple[int | None, int | None]) -> Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    left, right = window
    right = 0 if causal else right
    found = torch.ones(length, length, dtype=torch.bool)
    found &= distance >= -right if right is not None else found
    return found & (distance <= left) if left is not None else found


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, None]:
    """(B, S, H, D)"""
    assert how.keys() == {"softmax_scale", "causal", "window_size", "softcap"}
    assert how["softcap"] == 0.0
    mask = _band(q.shape[1], how["causal"], how["window_size"])
    return torch.stack([attention(*row, mask, how["softmax_scale"]) for row in zip(q, k, v, strict=True)]), None


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **further: Any
) -> tuple[Tensor, None]:
    """(total, H, D)"""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff()
    assert int(lengths.sum()) == len(q)
    assert int(lengths.max()) == further.pop("max_seqlen_q") == further.pop("max_seqlen_k")
    rows = zip(*(x.split(lengths.tolist()) for x in (q, k, v)), strict=True)
    return torch.cat([flash_attn_func(*(x[None] for x in row), **further)[0][0] for row in rows]), None


def create_mask_plan(mask_func: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> Tensor:
    """bool (B, S, S), from [0, F0) and [F1, F2) of each query."""
    heads, number, total = mask_func.shape
    batch, length = q.shape[:2]
    assert (heads, mask_func.dtype, total) == (1, torch.int32, batch * length)
    assert number % 2 == 1
    assert mask_func.is_contiguous()
    ends = torch.cat([torch.zeros_like(mask_func[:, :1]), mask_func], 1)[0]
    assert ((ends.diff(dim=0) >= 0) & (ends[1:] <= k.shape[1])).all()
    at = torch.arange(k.shape[1])
    found = torch.zeros(total, k.shape[1], dtype=torch.bool)
    for first, end in zip(ends[::2], ends[1::2], strict=True):
        found |= (at >= first[:, None]) & (at < end[:, None])
    return found.view(batch, length, -1)


def flex_attn_func(q: Tensor, k: Tensor, v: Tensor, *, mask_plan: Tensor, softmax_scale: float) -> Tensor:
    """(B, S, H, D)"""
    rows = zip(q, k, v, mask_plan, strict=True)
    return torch.stack([attention(*row, softmax_scale) for row in rows])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of both libraries."""
    flash = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    flex = SimpleNamespace(create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", flash)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", flex)  # type: ignore[arg-type]
