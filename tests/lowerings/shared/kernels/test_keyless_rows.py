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


@pytest.mark.parametrize("masked", [replaced, added])
@pytest.mark.parametrize("sizes", [(3, 2, 1, 1060, 70, 80, 48), (2, 4, 4, 37, 150, 16, 32)], ids=str)
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
