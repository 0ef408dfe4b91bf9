from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attn_compiler import Fp8Recipe
from attn_compiler.lowerings.fp8 import rounding

pytest.importorskip("triton")

B, H, S, D = 2, 3, 300, 48


@pytest.mark.parametrize("blocks", [1, 3])
def test_descales_of_blocks_spread_over_their_positions(blocks: int) -> None:
    descale = torch.rand(B, H, blocks)
    found = rounding.spread(descale, 128, 128 * blocks - 50)
    assert torch.equal(found, descale.repeat_interleave(128, 2)[:, :, :-50])


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_the_rotation_is_orthogonal_and_of_signs(size: int) -> None:
    x = torch.eye(size)[None, None]
    turned = rounding.rotated(x)[0, 0]
    torch.testing.assert_close(turned.abs(), torch.full((size, size), size**-0.5))
    torch.testing.assert_close(turned @ turned.T, torch.eye(size), rtol=0, atol=1e-5)
    assert torch.equal(turned, turned.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
def test_what_stands_in_for_what_was_rotated_turns_gradients_back(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(B, H, 20, size).to(dtype).requires_grad_()
    found = torch.ops.attn_compiler.stand_in_fp8(x)
    assert (found.shape, found.dtype, found.stride()) == (x.shape, dtype, (0, 0, 0, 0))
    upstream = torch.randn(x.shape).to(dtype)
    (gradient,) = torch.autograd.grad(found, x, upstream)
    torch.testing.assert_close(gradient.float(), rounding.rotated(upstream), rtol=0.02, atol=0.02)


def test_positions_last_lie_as_threads_hold_weights() -> None:
    """Of the accumulators of wgmma a thread has columns 2t, 2t + 1, 8 + 2t, 9 + 2t; of its 8-bit operand 4t ... 4t + 3."""
    held = [column for t in range(4) for column in (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)]
    x = torch.arange(20.0).view(1, 20, 1)
    found = rounding.turned(x)
    assert found.shape == (1, 1, 32)
    assert found[0, 0, :16].tolist() == held
    assert torch.equal(rounding.in_order(found)[0, 0, :20], x[0, :, 0])
    assert not rounding.in_order(found)[0, 0, 20:].any()


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_was_rotated_comes_back(dtype: torch.dtype) -> None:
    """Also where each number is the largest of e5m2, and a sum of them beyond float16."""
    x = torch.randn(B, H, S, 128)
    back = rounding.unrotated(rounding.rotated(x), dtype, near=0.125)
    assert back.dtype == torch.float32
    torch.testing.assert_close(back, x, rtol=0.02, atol=0.02)
    largest = torch.full((1, 1, 1, 128), 57344.0)
    first = rounding.unrotated(largest, dtype, near=1 / 128)[0, 0, 0]
    assert float(first[0]) == pytest.approx(57344 * 128**0.5)
    assert not first[1:].any()
