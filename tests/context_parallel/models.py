"""Small models, each with another mask or score change, and the batches that they take. All say what they mask by local positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

Batch = dict[str, torch.Tensor]
#: (q, k, v, data) -> out, in (B, H, S, D); data holds what the batch has besides x
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor], "Model"], torch.Tensor]

WIDTH, HEAD_DIM, BATCH = 32, 8, 2


class Model(nn.Module):
    """x (B, S, WIDTH) -> two attentions with a projection around each, and a rotation by position_ids."""

    def __init__(self, attend: Attend, heads: int, heads_kv: int, dim_v: int) -> None:
        super().__init__()
        self.attend, self.heads, self.heads_kv, self.dim_v = attend, heads, heads_kv, dim_v
        self.q = nn.Linear(WIDTH, heads * HEAD_DIM)
        self.k = nn.Linear(WIDTH, heads_kv * HEAD_DIM)
        self.v = nn.Linear(WIDTH, heads_kv * dim_v)
        self.out = nn.Linear(heads * dim_v, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(torch.randn(2 * 5 + 1, heads))
        self.sinks = nn.Parameter(torch.randn(heads))
        self.slopes: torch.Tensor
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, **data: torch.Tensor) -> torch.Tensor:
        """(B, S, WIDTH)"""
        for _ in range(2):
            y = self.norm(x)
            turn = torch.cos(position_ids.to(x.dtype) / 10)[:, :, None]
            q, k, v = (
                p(y * turn).unflatten(-1, (h, -1)).transpose(1, 2)
                for p, h in ((self.q, self.heads), (self.k, self.heads_kv), (self.v, self.heads_kv))
            )
            x = x + self.out(self.attend(q, k, v, data, self).transpose(1, 2).flatten(2))
        return x


@dataclass(frozen=True, kw_only=True)
class Case:
    """data: what a batch of whole sequences has besides x, for a length. real: which positions count, by the same."""

    attend: Attend
    heads: int = 4
    heads_kv: int = 4
    dim_v: int = HEAD_DIM
    data: Callable[[int], Batch] = lambda _: {}


def _positions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = torch.arange(x.shape[2], device=x.device)
    return count[:, None], count[None, :]


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])


def _weighted(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1) @ v.repeat_interleave(scores.shape[1] // v.shape[1], 1)


def _causal(q, k, v, data, model):
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _everything(q, k, v, data, model):
    return _sdpa(q, k, v, None)


def _eager_causal(q, k, v, data, model):
    i, j = _positions(q)
    return _weighted(_scores(q, k).masked_fill(j > i, -math.inf), v)


def _padded(q, k, v, data, model):
    return _sdpa(q, k, v, data["mask"][:, None, None, :])


def _causal_padded(q, k, v, data, model):
    i, j = _positions(q)
    return _sdpa(q, k, v, (j <= i) & data["mask"][:, None, None, :])


def _eager_padded(q, k, v, data, model):
    added = (1.0 - data["mask"][:, None, None, :].to(q.dtype)) * torch.finfo(torch.float32).min
    return _weighted(_scores(q, k) + added, v)


def _window(q, k, v, data, model):
    i, j = _positions(q)
    return _sdpa(q, k, v, (j <= i) & (i - j < 11))


def _wide_window(q, k, v, data, model):
    """Wider than a rank's part: on one rank it would leave out nothing."""
    i, j = _positions(q)
    return _sdpa(q, k, v, (j <= i) & (i - j < 21))


def _chunked(q, k, v, data, model):
    i, j = _positions(q)
    return _sdpa(q, k, v, (j <= i) & (i // 10 == j // 10))


def _documents(q, k, v, data, model):
    doc = data["documents"]
    return _sdpa(q, k, v, (doc[:, None, :, None] == doc[:, None, None, :]))


def _causal_documents(q, k, v, data, model):
    i, j = _positions(q)
    doc = data["documents"]
    return _sdpa(q, k, v, (j <= i) & (doc[:, None, :, None] == doc[:, None, None, :]))


def _counted_documents(q, k, v, data, model):
    """Documents are counted from where they begin, along the sequence: that runs over all of it."""
    i, j = _positions(q)
    doc = data["begins"].to(torch.int64).cumsum(-1)
    return _sdpa(q, k, v, (j <= i) & (doc[:, None, :, None] == doc[:, None, None, :]))


def _prefix(q, k, v, data, model):
    i, j = _positions(q)
    return _sdpa(q, k, v, (j <= i) | (j < 13))


def _alibi(q, k, v, data, model):
    i, j = _positions(q)
    bias = model.slopes.to(q.dtype)[:, None, None] * (j - i)
    return _sdpa(q, k, v, bias[None].masked_fill(j > i, -math.inf))


def _relative(q, k, v, data, model):
    i, j = _positions(q)
    bias = model.table[(j - i).clamp(-5, 5) + 5].permute(2, 0, 1)[None]
    return _weighted(_scores(q, k) + bias, v)


def _softcap(q, k, v, data, model):
    i, j = _positions(q)
    scores = torch.tanh(_scores(q, k) / 2.0) * 2.0
    return _weighted(scores.masked_fill(j > i, -math.inf), v)


def _sunk(q, k, v, data, model):
    i, j = _positions(q)
    scores = _scores(q, k).masked_fill(j > i, -math.inf)
    column = model.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _mask(left: bool) -> Callable[[int], Batch]:
    def make(length: int) -> Batch:
        count = torch.arange(length)
        lengths = torch.tensor([length, length - 9])[:, None]
        return {"mask": count >= length - lengths if left else count < lengths}

    return make


def _docs(length: int) -> Batch:
    count = torch.arange(length)
    return {"documents": torch.stack((count // 12, (count > 5).long() + (count > 19)))}


def _begins(length: int) -> Batch:
    count = torch.arange(length)
    return {"begins": torch.stack((count % 12 == 0, (count == 6) | (count == 20)))}


CASES: Mapping[str, Case] = {
    "causal": Case(attend=_causal),
    "causal, eager": Case(attend=_eager_causal),
    "causal, 8 heads share 2": Case(attend=_causal, heads=8, heads_kv=2),
    "causal, 8 heads share 1": Case(attend=_causal, heads=8, heads_kv=1),
    "causal, eager, 4 heads share 2": Case(attend=_eager_causal, heads_kv=2),
    "none": Case(attend=_everything),
    "values of another width": Case(attend=_causal, dim_v=4),
    "right padding": Case(attend=_padded, data=_mask(False)),
    "left padding": Case(attend=_padded, data=_mask(True)),
    "causal, right padding": Case(attend=_causal_padded, data=_mask(False)),
    "padding, eager": Case(attend=_eager_padded, data=_mask(False)),
    "window": Case(attend=_window),
    "window wider than a part": Case(attend=_wide_window),
    "chunks": Case(attend=_chunked),
    "documents": Case(attend=_documents, data=_docs),
    "causal documents": Case(attend=_causal_documents, data=_docs),
    "documents counted along the sequence": Case(attend=_counted_documents, data=_begins),
    "prefix": Case(attend=_prefix),
    "ALiBi": Case(attend=_alibi),
    "relative bias, learned": Case(attend=_relative),
    "softcap": Case(attend=_softcap),
    "sinks": Case(attend=_sunk),
}


def _near(q, k, v, data, model):
    i, j = _positions(q)
    return _sdpa(q, k, v, (j <= i) & (i - j < 5))


def _both_sides(q, k, v, data, model):
    i, j = _positions(q)
    return _sdpa(q, k, v, (i - j).abs() <= 3)


def _ahead(q, k, v, data, model):
    """More ahead than back."""
    i, j = _positions(q)
    return _sdpa(q, k, v, (i - j < 3) & (j - i < 6))


def _near_or_ahead(q, k, v, data, model):
    i, j = _positions(q)
    return _sdpa(q, k, v, ((j <= i) & (i - j < 6)) | ((i - j).abs() <= 2))


def _near_padded(q, k, v, data, model):
    i, j = _positions(q)
    return _sdpa(q, k, v, (j <= i) & (i - j < 5) & data["mask"][:, None, None, :])


def _near_documents(q, k, v, data, model):
    i, j = _positions(q)
    doc = data["documents"]
    return _sdpa(q, k, v, ((i - j).abs() <= 4) & (doc[:, None, :, None] == doc[:, None, None, :]))


def _near_alibi(q, k, v, data, model):
    i, j = _positions(q)
    bias = model.slopes.to(q.dtype)[:, None, None] * (j - i)
    return _sdpa(q, k, v, bias[None].masked_fill((j > i) | (i - j > 5), -math.inf))


def _near_sunk(q, k, v, data, model):
    i, j = _positions(q)
    scores = _scores(q, k).masked_fill((j > i) | (i - j > 5), -math.inf)
    column = model.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _whole_chunks(q, k, v, data, model):
    i, j = _positions(q)
    return _sdpa(q, k, v, i // 4 == j // 4)


#: which let a query see the keys near it alone
NEAR: Mapping[str, Case] = {
    "near": Case(attend=_near),
    "near, 4 heads share 1, values of another width": Case(attend=_near, heads_kv=1, dim_v=4),
    "near on both sides": Case(attend=_both_sides),
    "further ahead than back": Case(attend=_ahead),
    "near, or ahead": Case(attend=_near_or_ahead),
    "near, left padding": Case(attend=_near_padded, data=_mask(True)),
    "near, of one document": Case(attend=_near_documents, data=_docs),
    "near, ALiBi": Case(attend=_near_alibi),
    "near, sinks": Case(attend=_near_sunk),
    "chunks that a rank has whole": Case(attend=_whole_chunks),
}
EVERY = {**CASES, **NEAR}


def build(case: Case) -> Model:
    """In float64, with the same numbers on every rank."""
    torch.manual_seed(0)
    return Model(case.attend, case.heads, case.heads_kv, case.dim_v).double()


def batch(case: Case, length: int) -> Batch:
    """Whole sequences."""
    x = torch.randn(BATCH, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length).expand(BATCH, length).contiguous()
    return {"x": x, "position_ids": positions, **case.data(length)}
