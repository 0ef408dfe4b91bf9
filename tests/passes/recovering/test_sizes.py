"""A length may be any expression of a symbol: what is known at the first length is known at the second, and it is what eager computes.

Forms of a length x masks x the first and the second, symbolic length x machines, on the meta device; and in float64 on a CPU against the
model itself, down to lengths at which some of the forms are empty.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.spec.target import Target

MACHINES = [Target.fake(sm=sm) for sm in (80, 89, 90, 100)]
OPTIONS = {"inner": "eager", "cache_rewrites": False, "strict": True}
HEADS, DIM = 2, 16


def _patches(x: Tensor, size: int) -> Tensor:
    return x[:, : x.shape[1] // size * size, 0].unflatten(1, (-1, size))


#: (batch, s, t, dim) -> (batch, length, dim), by what the length is
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "s": lambda x: x[:, :, 0],
    "s + 1": lambda x: F.pad(x[:, :, 0], (0, 0, 1, 0)),
    "2s": lambda x: x[:, :, 0].repeat_interleave(2, 1),
    "s // 4": lambda x: _patches(x, 4).mean(2),
    "s // 4 + 1": lambda x: F.pad(_patches(x, 4).mean(2), (0, 0, 1, 0)),
    "(s + 3) // 4": lambda x: x[:, ::4, 0],
    "4(s // 16)": lambda x: _patches(x, 16).flatten(1, 2)[:, ::4],
    "(s - 1) // 2 + 1": lambda x: F.avg_pool1d(x[:, :, 0].mT, 3, 2, 1).mT,
    "s t": lambda x: x.flatten(1, 2),
    "s²": lambda x: (x + x.transpose(1, 2)).flatten(1, 2),
    "s² // s": lambda x: (x + x.transpose(1, 2)).reshape(x.shape[0] * x.shape[1], -1, x.shape[-1]),
    "max(s, 16)": lambda x: F.pad(x[:, :, 0], (0, 0, 0, max(16 - x.shape[1], 0))),
    "min(s, 5000)": lambda x: x[:, : min(x.shape[1], 5000), 0],
    "s - s % 4": lambda x: x[:, : x.shape[1] - x.shape[1] % 4, 0],
    "8, batch 4B": lambda x: x[:, :, 0].reshape(-1, 8, x.shape[-1]),
    "8, batch B · 4": lambda x: x[:, :, 0].reshape(x.shape[0] * 4, 8, x.shape[-1]),
}
#: where both sizes change, or only one of them
SQUARE, BATCH = ("s t", "s²", "s² // s"), ("8, batch 4B", "8, batch B · 4")


def _x(form: str, n: int, make: Callable[..., Tensor]) -> Tensor:
    if form in BATCH:
        return make(n, 32, 2, DIM)
    return make(2, n, n + (form == "s t") if form in SQUARE else 2, DIM)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "padding": lambda i, length: (i < length)[None, None, None, :],
    "causal": lambda i, length: i[None, :] <= i[:, None],
    "window": lambda i, length: (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < 3),
    "padding from the left": lambda i, length: (i[None, :] >= i.shape[0] - length) & (i[None, :] <= i[:, None]),
}


def _attention(x: Tensor, w: Tensor, length: Tensor, form: str, mask: str) -> Tensor:
    x = FORMS[form](x)
    q, k, v = (x @ w[:, DIM:]).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4).unbind(0)
    if mask == "bias":
        bias = (x @ w[:, :HEADS]).mT[:, :, None]
        return (q @ k.mT * 0.25 + bias).softmax(-1) @ v
    i = torch.arange(q.shape[2], device=x.device)
    if mask == "documents":
        documents = (x[..., 0] > 0).cumsum(1)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=documents[..., None] == documents[..., None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=MASKS[mask](i, length) if mask in MASKS else None)


def _compiled(form: str, mask: str) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    attn_compiler.reset()
    compiled: Callable[..., Tensor] = torch.compile(
        functools.partial(_attention, form=form, mask=mask), backend="attn_compiler", options=OPTIONS
    )
    return compiled


@pytest.mark.in_turns
@pytest.mark.parametrize("mask", ["none", *MASKS, "documents", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_a_second_length_loses_nothing(form: str, mask: str) -> None:
    compiled = _compiled(form, mask)
    meta = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    of_one = functools.partial(torch.empty, (), device="meta", dtype=torch.long)
    for n in (64, 48, 40) if form in (*SQUARE, *BATCH) else (4096, 3200, 2880):
        with torch.no_grad():
            compiled(_x(form, n, meta), meta(DIM, DIM + 3 * HEADS * DIM), of_one())
    first, second = (site.spec for report in attn_compiler.reports() for site in report.sites)
    assert any(isinstance(size, str) for size in (*second.q.shape[:3], *second.k.shape[:3]))
    assert mask == "bias" or (first.mask.reason, second.mask.reason) == (None, None)
    kinds = [tuple(type(kind) for kind in spec.mask.conditions) for spec in (first, second)]
    assert kinds[0] == kinds[1]
    for spec in (first, second):
        chosen = [decide(dataclasses.replace(spec, device="cuda"), machine, Options()).lowering for machine in MACHINES]
        assert "untouched" not in chosen


@pytest.mark.in_turns
@pytest.mark.parametrize("mask", ["none", *MASKS, "documents", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_each_length_is_computed_as_the_model_does(form: str, mask: str) -> None:
    compiled = _compiled(form, mask)
    torch.manual_seed(0)
    made = functools.partial(torch.randn, dtype=torch.float64)
    w = made(DIM, DIM + 3 * HEADS * DIM)
    # PyTorch itself can neither reshape nothing into a batch of nothing, nor pool nothing.
    for n in (32, 21, 18, 16, 5, 3, 2, 1, *(() if form in ("s² // s", "(s - 1) // 2 + 1") else (0,))):
        x, length = _x(form, n, made), torch.tensor(max(1, n // 2))
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(x, w, length), _attention(x, w, length, form, mask), equal_nan=True, atol=1e-9, rtol=1e-9
            )
