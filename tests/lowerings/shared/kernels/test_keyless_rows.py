"""Rows without keys behind our kernels: many blocks of them, groups of heads, odd sizes; outputs and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from attn_compiler.lowerings import by_name
from attn_compiler.spec.target import Target
from tests.passes.compiling import compiled

Masked = Callable[[Tensor, Tensor], Tensor]


def replaced(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)


def added(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores + torch.zeros_like(scores).masked_fill(~allowed, torch.finfo(scores.dtype).min)


def attention(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, masked: Masked) -> Tensor:
    """queries: (B, Sq), keys: (B, Skv), which take part."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = masked(q @ k.mT * 0.2, queries[:, None, :, None] & keys[:, None, None, :])
    return scores.softmax(-1) @ v


def problem(sizes: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """q, k and v; which queries and keys take part; and an upstream gradient. Of the last batch row no key does, of the first all do."""
    batch, heads_q, heads_kv, queries, keys, head_dim, head_dim_v = sizes
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, k = drawn(batch, heads_q, queries, head_dim), drawn(batch, heads_kv, keys, head_dim)
    v = drawn(batch, heads_kv, keys, head_dim_v)
    of_q, of_k = (torch.rand(batch, size, generator=generator) > 0.3 for size in (queries, keys))
    of_q[0], of_k[0], of_k[-1] = True, True, False
    of_q[1, : queries // 2] = False
    takes_part = [of_q.to(device), of_k.to(device)]
    return [x.requires_grad_() for x in (q, k, v)], takes_part, drawn(batch, heads_q, queries, head_dim_v)


def results(call: Callable[..., Tensor], tensors: list[Tensor], takes_part: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = call(*tensors, *takes_part)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype))]


def check(masked: Masked, lowering: str, sizes: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    tensors, takes_part, grad = problem(sizes, device, dtype)

    def function(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return attention(q, k, v, queries, keys, masked)

    run = compiled(function, lowering=lowering)
    found = results(run, tensors, takes_part, grad)
    assert run.site.decision.lowering == lowering
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = results(function, wide, takes_part, grad)
    eager = results(function, tensors, takes_part, grad)
    for one, other, plain in zip(found, exact, eager, strict=True):
        worst = (plain - other).abs().max()
        assert (one - other).abs().max() <= 3 * worst + 1e-5 * other.abs().max()


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("masked", [replaced, added])
@pytest.mark.parametrize("sizes", [(2, 4, 4, 37, 150, 16, 32), (3, 2, 1, 1060, 70, 80, 48)], ids=str)
def test_outputs_and_gradients_are_eagers(masked: Masked, sizes: tuple[int, ...]) -> None:
    check(masked, "triton", sizes, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [replaced, added])
@pytest.mark.parametrize("lowering", ["triton", "hopper"])
@pytest.mark.parametrize(
    "sizes", [(3, 8, 2, 2100, 1300, 128, 128), (3, 4, 4, 515, 515, 64, 64), (2, 4, 1, 300, 1000, 256, 256)], ids=str
)
def test_outputs_and_gradients_are_eagers_on_a_gpu(masked: Masked, lowering: str, sizes: tuple[int, ...]) -> None:
    if by_name(lowering).unavailable(Target.current("cuda")):
        pytest.skip(f"{lowering} does not run on this machine")
    check(masked, lowering, sizes, "cuda", torch.bfloat16)


# ---- numbers that come in, which nobody read ------------------------------------------------------------------------


def numbers(sizes: tuple[int, ...], device: str, dtype: torch.dtype, low: float, other: float | None = None) -> Tensor:
    """(B, 1, Sq, Skv): some keys, some queries and the last batch row get `low`; of some of those queries, keys get `other` instead."""
    batch, _, _, queries, keys, *_ = sizes
    generator = torch.Generator().manual_seed(5)
    found = torch.zeros(batch, 1, queries, keys)
    found.masked_fill_(torch.rand(batch, 1, queries, keys, generator=generator) < 0.3, low)
    found[-1] = found[0, :, queries // 3 : queries // 2] = low
    if other is not None:
        found[0, :, queries // 3 : queries // 2, ::3] = other
    return found.to(device, dtype)


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v


def by_call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def check_numbers(function: Callable[..., Tensor], lowering: str, sizes: tuple[int, ...], mask: Tensor) -> None:
    """Against float32, in which low numbers leave nothing of the scores, as in the model's dtype."""
    tensors, _, grad = problem(sizes, mask.device.type, mask.dtype)
    run = compiled(function, lowering=lowering)
    found = results(run, tensors, [mask], grad)
    assert run.site.decision.lowering == lowering
    assert run.site.spec.adds_unread
    wide = [x.detach().float().requires_grad_() for x in tensors]
    exact = results(by_hand, wide, [mask.float()], grad)
    eager = results(by_hand, tensors, [mask], grad)
    for one, other, plain in zip(found, exact, eager, strict=True):
        worst = (plain - other).abs().max()
        assert (one - other).abs().max() <= 3 * worst + 1e-5 * other.abs().max()


@pytest.mark.in_turns
@pytest.mark.parametrize("function", [by_hand, by_call])
@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e30, -1e9], ids=str)
def test_queries_that_got_one_low_number_are_means(function: Callable[..., Tensor], low: float) -> None:
    """In units of log 2 the lowest number is -inf, and beside -1e9 an lse can't hold how many keys share a row."""
    sizes = (2, 4, 2, 75, 150, 16, 32)
    check_numbers(function, "triton", sizes, numbers(sizes, "cpu", torch.float32, low))


@pytest.mark.parametrize("other", [-torch.inf, torch.finfo(torch.float32).min], ids=str)
def test_of_two_low_numbers_the_higher_one_counts(other: float) -> None:
    sizes = (2, 4, 2, 75, 150, 16, 32)
    mask = numbers(sizes, "cpu", torch.float32, -1e9, other)
    tensors, _, _ = problem(sizes, "cpu", torch.float32)
    with torch.no_grad():
        run = compiled(by_hand, lowering="triton")
        torch.testing.assert_close(run(*tensors, mask), by_hand(*tensors, mask))


@pytest.mark.gpu
@pytest.mark.parametrize("function", [by_hand, by_call])
@pytest.mark.parametrize("lowering", ["triton", "hopper"])
@pytest.mark.parametrize("low", [torch.finfo(torch.bfloat16).min, -1e9], ids=str)
@pytest.mark.parametrize("sizes", [(3, 8, 2, 2100, 1304, 128, 128), (3, 4, 4, 520, 520, 64, 64)], ids=str)
def test_queries_that_got_one_low_number_are_means_on_a_gpu(
    function: Callable[..., Tensor], lowering: str, low: float, sizes: tuple[int, ...]
) -> None:
    if by_name(lowering).unavailable(Target.current("cuda")):
        pytest.skip(f"{lowering} does not run on this machine")
    check_numbers(function, lowering, sizes, numbers(sizes, "cuda", torch.bfloat16, low))
