"""Queries that the mask shuts out as a whole: outputs and gradients at every position are eager's, a loss on those rows included."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.passes import shut_queries
from attn_compiler.passes.shut_queries import MaskingCondition
from tests.passes.compiling import compiled

B, S, D = 3, 12, 8
LOWEST = torch.finfo(torch.float32).min
REAL_QUERY = ix.as_bool(Load("real", (Index("b"), Index("q")), "int"))
REAL_KEY = ix.as_bool(Load("real", (Index("b"), Index("k")), "int"))


def padding() -> Tensor:
    """(B, S): no padding, some, and all but one."""
    return (torch.arange(S) < torch.tensor([S, 7, 1])[:, None]).long()


def inputs(heads_kv: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, 4, S, D), (B, heads_kv, S, D), (B, heads_kv, S, D))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def filled(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """As DeBERTa-v2 masks: with one number, where the query or the key is padding."""
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    allowed = (real[:, None, None, :] * real[:, None, :, None]).bool()
    return scores.masked_fill(~allowed, LOWEST).softmax(-1) @ v.repeat_interleave(2, 1)


def added(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    allowed = (real[:, None, None, :] * real[:, None, :, None]).bool()
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3 + torch.where(allowed, 0.0, LOWEST)
    return scores.softmax(-1) @ v.repeat_interleave(2, 1)


def filled_twice(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    scores = scores.masked_fill(real[:, None, None, :] == 0, LOWEST).masked_fill(real[:, None, :, None] == 0, LOWEST)
    return scores.softmax(-1) @ v.repeat_interleave(2, 1)


def after_a_bias(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    bias = (torch.arange(S)[:, None] - torch.arange(S)).abs() * -0.5
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3 + bias
    allowed = real[:, None, None, :].bool() & real[:, None, :, None].bool()
    return scores.masked_fill(~allowed, -65504.0).softmax(-1) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize("lowering", ["reference", "math"])
@pytest.mark.parametrize("function", [filled, added, filled_twice, after_a_bias])
def test_every_row_is_eagers(function: Callable[..., Tensor], lowering: str) -> None:
    """Where the number is added, eager's q and k get gradients of scores that rounding has drowned: there the gradient of v is compared."""
    real, seen = padding(), []
    run = compiled(function, lowering=lowering, verify=True)
    for call in (function, run):
        tensors = inputs()
        out = call(*tensors, real)
        # The loss is on padding, too.
        out.square().sum().backward()
        compared = tensors[2:] if function is added else tensors
        seen.append([out.detach(), *(x.grad for x in compared)])
        assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
    assert shut_queries.NOTE in run.site.notes


def test_nothing_is_done_for_padding_of_keys_alone() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(real[:, None, None, :] == 0, LOWEST).softmax(-1) @ v

    run = compiled(function, lowering="reference")
    run(*inputs(heads_kv=4), padding())
    assert shut_queries.NOTE not in run.site.notes


def masked_again(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """As DeBERTa's first softmax: a query without keys has no weights at all."""
    out = ~(real[:, None, None, :].bool() & real[:, None, :, None].bool())
    return (q @ k.mT).masked_fill(out, LOWEST).softmax(-1).masked_fill(out, 0.0) @ v


def multiplied_again(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    allowed = real[:, None, None, :].bool() & real[:, None, :, None].bool()
    return ((q @ k.mT).masked_fill(~allowed, LOWEST).softmax(-1) * allowed) @ v


@pytest.mark.parametrize("lowering", ["reference", "math"])
@pytest.mark.parametrize("function", [masked_again, multiplied_again])
def test_a_row_whose_weights_are_set_to_zero_stays_zero(function: Callable[..., Tensor], lowering: str) -> None:
    run = compiled(function, lowering=lowering)
    seen = []
    for call in (function, run):
        tensors = inputs(heads_kv=4)
        out = call(*tensors, padding())
        out.sin().sum().backward()
        seen.append([out.detach(), *(x.grad for x in tensors)])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
    assert not seen[1][0][1, :, 7:].any()
    assert shut_queries.NOTE not in run.site.notes


def test_a_row_that_infinity_shuts_out_stays_zero() -> None:
    """Eager has NaN there."""

    def function(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill((real[:, None, None, :] * real[:, None, :, None]) == 0, -math.inf).softmax(-1) @ v

    run = compiled(function, lowering="reference")
    with torch.no_grad():
        out = run(*inputs(heads_kv=4), padding())
    assert not out[1, :, 7:].any()
    assert out.isfinite().all()


def test_lengths_may_be_symbolic() -> None:
    run = compiled(filled, dynamic=True, lowering="reference")
    for length in (S, S - 3):
        tensors = [x[:, :, :length].detach() for x in inputs()]
        real = padding()[:, :length]
        torch.testing.assert_close(run(*tensors, real), filled(*tensors, real), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("masks", "found"),
    [
        ([(ix.apply("and", REAL_QUERY, REAL_KEY), -1e9, True)], True),
        ([(REAL_KEY, -1e9, True), (REAL_QUERY, -1e9, True)], True),
        ([(REAL_KEY, -1e9, True)], False),
        ([(REAL_QUERY, -math.inf, True)], False),
        ([(REAL_QUERY, -1e9, False)], False),
        ([(REAL_QUERY, LOWEST, False)], True),
        # A key that is filled with less than another one is not of the same weight.
        ([(REAL_QUERY, -1e9, True), (REAL_KEY, -1e5, True)], False),
        ([], False),
    ],
)
def test_condition(masks: list[tuple[ix.Expr, float, bool]], found: bool) -> None:
    given = [MaskingCondition(allowed=allowed, fill=fill, keeps_fill=keeps) for allowed, fill, keeps in masks]
    assert shut_queries.condition(given) == (REAL_QUERY if found else None)
