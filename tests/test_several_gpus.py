"""Several GPUs of one process: what was compiled and launched for one is not taken for another, whichever is the current one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_compiler

DEVICES = ("cuda:1", "cuda:0", "cuda:1")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices of one process"),
]


def attention(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Causal, with padding: a mask that is read from the device. q, k, v: (B, H, S, D); padding: bool (B, S)."""
    positions = torch.arange(q.shape[2], device=q.device)
    mask = (positions[:, None] >= positions[None, :]) & padding[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def inputs(device: str, seqlen: int, padded: int) -> tuple[list[Tensor], Tensor]:
    """padded: keys of the first row that are padding, but for its first, so that every query has a key."""
    generator = torch.Generator().manual_seed(seqlen + padded)
    tensors = [torch.randn(2, 4, seqlen, 64, generator=generator).to(device, torch.bfloat16) for _ in range(3)]
    padding = torch.ones(2, seqlen, dtype=torch.bool, device=device)
    padding[0, 1 : padded + 1] = False
    return [x.requires_grad_() for x in tensors], padding


def results(function: Callable[..., Tensor], tensors: Sequence[Tensor], padding: Tensor) -> list[Tensor]:
    """out and the gradients of q, k and v."""
    out = function(*tensors, padding)
    return [out, *torch.autograd.grad(out.float().square().sum(), tensors)]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("lowering", ["triton", "sdpa_efficient", "reference"])
def test_each_device_gets_its_own_numbers(lowering: str, current: int) -> None:
    attn_compiler.reset()
    compiled = torch.compile(attention, backend="attn_compiler", options={"lowering": lowering})
    with torch.cuda.device(current):
        for i, device in enumerate(DEVICES):
            tensors, padding = inputs(device, 700, 100 + i)
            expected = results(attention, [x.detach().float().requires_grad_() for x in tensors], padding)
            found = results(compiled, tensors, padding)
            for mine, exact in zip(found, expected, strict=True):
                assert mine.device == torch.device(device)
                assert (mine.float() - exact).abs().max() < 0.03 * exact.abs().max()
        assert torch.cuda.current_device() == current


def test_streams_of_both_devices_are_used_at_once() -> None:
    attn_compiler.reset()
    compiled = torch.compile(attention, backend="attn_compiler", options={"lowering": "triton"})
    given = {device: inputs(device, 900, 50) for device in DEVICES[:2]}
    for _ in range(2):
        found = {device: results(compiled, *given[device]) for device in given}
    for mine, other in zip(*(found[device] for device in found), strict=True):
        assert torch.equal(mine.cpu(), other.cpu())
