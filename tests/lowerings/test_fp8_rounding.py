from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attn_compiler import Fp8Recipe
from attn_compiler.lowerings import fp8_rounding
from attn_compiler.lowerings.fp8_rounding import How
from tests.lowerings.fp8_problems import rounding_as_hardware

pytest.importorskip("triton")

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter, which has to be chosen before"
)

B, H, S, D = 2, 3, 300, 48

CASES = {
    "block": How(format="e4m3", block=128),
    "blocks of two parts": How(format="e4m3", block=256, margin=1, factor=0.5, restore="float16"),
    "turned": How(format="e4m3", block=128, turned=True, restore="float16"),
    "int8": How(format="int8", block=128, restore="float16"),
    "e5m2": How(format="e5m2", block=128),
}


def given(device: str = "cpu", dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(B, S, H, D, generator=generator).transpose(1, 2)
    x[0, 0, :128] *= 20
    x[1, 1, 128:256] = 0
    x[0, 1, 5, 7], x[0, 1, 6, 7] = torch.nan, torch.inf
    return x.to(device, dtype)


def extras(x: Tensor, how: How) -> list[tuple[Tensor | None, Tensor | None]]:
    mean = torch.linspace(-1, 1, B * H * D, device=x.device).view(B, H, 1, D)
    scale = how.largest / (torch.arange(1.0, 1 + B * H, device=x.device).view(B, H, 1) * 20)
    return [(None, None), (mean, None), (None, scale), (None, scale[:1, :1])]


def assert_same(mine: fp8_rounding.Outputs, right: fp8_rounding.Outputs) -> None:
    """Where a quotient is rounded otherwise, a number may be the next one: seldom."""
    for got, expected in zip(mine, right, strict=True):
        assert got.dtype == expected.dtype
        assert got.stride() == expected.stride()
        numbers, wanted = got.float(), expected.float()
        same = torch.isclose(numbers, wanted, rtol=2e-3, atol=1e-6, equal_nan=True)
        assert float(same.double().mean() if same.numel() else 1.0) > 0.999


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_what_pytorch_gives(name: str) -> None:
    from attn_compiler.lowerings import fp8_rounding_launch

    x, how = given(), CASES[name]
    for mean, scale in extras(x, how):
        with rounding_as_hardware():
            mine = fp8_rounding_launch.round_fp8(x, mean, scale, how.to_text())
        assert_same(mine, fp8_rounding._in_pytorch(x, mean, scale, how))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [D, 64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_too(name: str, head_dim: int) -> None:
    x, how = given("cuda", torch.bfloat16), CASES[name]
    x = torch.cat([x] * 6, 3)[..., :head_dim] if head_dim != D else x
    mine = fp8_rounding.round_fp8(x, None, None, how.to_text())
    right = fp8_rounding._in_pytorch(x, None, None, how)
    assert_same(mine, right)


def test_what_is_restored_passes_gradients_on() -> None:
    how = How(format="e4m3", block=128, factor=0.5, restore="float16")
    x = torch.randn(B, H, S, D).half().requires_grad_()
    rounded, descale, restored = torch.ops.attn_compiler.round_fp8(x, None, None, how.to_text())
    assert not rounded.requires_grad
    assert not descale.requires_grad
    torch.testing.assert_close(restored.float(), 0.5 * x.float(), rtol=0.07, atol=1e-2)
    restored.backward(torch.ones_like(restored))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 0.5))


def test_positions_last_lie_as_threads_hold_weights() -> None:
    """Of the accumulators of wgmma a thread has columns 2t, 2t + 1, 8 + 2t, 9 + 2t; of its 8-bit operand 4t ... 4t + 3."""
    held = [column for t in range(4) for column in (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)]
    x = torch.arange(20.0).view(1, 20, 1)
    found = fp8_rounding.turned(x)
    assert found.shape == (1, 1, 32)
    assert found[0, 0, :16].tolist() == held
    assert torch.equal(fp8_rounding.in_order(found)[0, 0, :20], x[0, :, 0])
    assert not fp8_rounding.in_order(found)[0, 0, 20:].any()


def test_in_a_checkpoint_gradients_are_the_same() -> None:
    """It is computed again there."""
    torch.manual_seed(0)
    projection = torch.nn.Linear(64, 192).bfloat16()

    def attend(x: Tensor) -> Tensor:
        q, k, v = projection(x).view(2, 96, 3, 2, 32).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 96, 64)

    def again(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(attend, x, use_reentrant=False)
        return out

    x, found = torch.randn(2, 96, 64).bfloat16(), []
    for function in (attend, again):
        options = {"fp8_recipe": Fp8Recipe(), "lowering": "reference_fp8", "strict": True, "inner": "aot_eager"}
        torch.compile(function, backend="attn_compiler", options=options, fullgraph=True)(
            x
        ).float().square().sum().backward()
        assert projection.weight.grad is not None
        found.append(projection.weight.grad.clone())
        projection.zero_grad()
    assert torch.equal(*found)
    assert bool(found[0].any())
