from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attn_compiler import Fp8Recipe
from attn_compiler.lowerings import fp8_rounding
from attn_compiler.lowerings.fp8_rounding import How, Rounding
from tests.lowerings.fp8_problems import rounding_as_hardware

pytest.importorskip("triton")

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter, which has to be chosen before"
)

B, H, S, D = 2, 3, 300, 48

CASES = {
    "block": Rounding(each=(How(format="e4m3"),), block=128),
    "blocks of two parts": Rounding(each=(How(format="e4m3", margin=1, factor=0.5, restore="float16"),), block=256),
    "turned": Rounding(each=(How(format="e4m3", turned=True, restore="float16"),), block=128),
    "int8": Rounding(each=(How(format="int8", restore="float16"),), block=128),
    "e5m2": Rounding(each=(How(format="e5m2", as_given=True),), block=128),
    "three": Rounding(
        each=(
            How(format="int8"),
            How(format="e4m3", has_mean=True, restore="float16"),
            How(format="e4m3", turned=True),
        ),
        block=128,
    ),
}
PER: tuple[fp8_rounding.Per, ...] = ("tensor", "head", "row")


def given(device: str = "cpu", dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(B, S, H, D, generator=generator).transpose(1, 2)
    x[0, 0, :128] *= 20
    x[1, 1, 128:256] = 0
    x[0, 1, 5, 7], x[0, 1, 6, 7] = torch.nan, torch.inf
    return x.to(device, dtype)


def tensors(how: Rounding, x: Tensor) -> list[Tensor]:
    """Of different sizes."""
    return [x, x[:, :2, :200] * 3, x[:1, 1:, 50:] + 1][: len(how.each)]


def extras(given: list[Tensor]) -> list[tuple[Tensor | None, list[Tensor]]]:
    """A mean, and magnitudes."""
    wide = given[min(1, len(given) - 1)]
    mean = torch.linspace(-1, 1, wide[:, :, :1].numel(), device=wide.device).view(wide[:, :, :1].shape)
    of_rows = [1 + torch.arange(x[:, :, 0, 0].numel(), device=x.device).view(*x.shape[:2], 1).float() for x in given]
    return [(None, []), (mean, []), (None, of_rows), (mean, [x[:1, :1].contiguous() for x in of_rows])]


def assert_same(mine: list[Tensor], right: list[Tensor]) -> None:
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
    read = tensors(how, x)
    for mean, largest in extras(read):
        for per in (None, *(PER if largest else ())):
            asked = dataclasses.replace(how, per=per)
            with rounding_as_hardware():
                mine = fp8_rounding_launch.round_fp8(read, mean, largest, asked.to_text())
            assert_same(mine, fp8_rounding._round_in_pytorch(read, mean, largest, asked))


@interpreted
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("name", ["blocks of two parts", "three"])
def test_the_largest_magnitudes_are_those_of_what_is_finite(name: str, per: fp8_rounding.Per) -> None:
    from attn_compiler.lowerings import fp8_rounding_launch

    how = dataclasses.replace(CASES[name], per=per)
    read = tensors(how, given())
    for mean, _ in extras(read)[:2]:
        mine = fp8_rounding_launch.largest_fp8(read, mean, how.to_text())
        torch.testing.assert_close(mine, fp8_rounding._largest_in_pytorch(read, mean, how))
        assert mine.shape == fp8_rounding._fake_largest(read, mean, how.to_text()).shape


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [D, 64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_too(name: str, head_dim: int) -> None:
    x, how = given("cuda", torch.bfloat16), CASES[name]
    x = torch.cat([x] * 6, 3)[..., :head_dim] if head_dim != D else x
    read = tensors(how, x)
    for mean, largest in extras(read):
        asked = dataclasses.replace(how, per="head" if largest else None)
        mine = fp8_rounding.round_fp8(read, mean, largest, asked.to_text())
        assert_same(mine, fp8_rounding._round_in_pytorch(read, mean, largest, asked))
        for per in PER:
            asked = dataclasses.replace(how, per=per)
            found = fp8_rounding.largest_fp8(read, mean, asked.to_text())
            torch.testing.assert_close(found, fp8_rounding._largest_in_pytorch(read, mean, asked))


def test_what_is_restored_passes_gradients_on() -> None:
    each = (How(format="e4m3", factor=0.5, restore="float16"), How(format="e5m2", restore="float16"))
    how = Rounding(each=each, block=128)
    x = torch.randn(B, H, S, D).half().requires_grad_()
    y = torch.randn(B, H, S, D).half().requires_grad_()
    outputs = torch.ops.attn_compiler.round_fp8([x, y], None, [], how.to_text())
    assert [output.requires_grad for output in outputs] == [False, False, True] * 2 + [False]
    torch.testing.assert_close(outputs[2].float(), 0.5 * x.float(), rtol=0.07, atol=1e-2)
    (outputs[2] + 3 * outputs[5]).backward(torch.ones_like(x))
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 0.5))
    assert torch.equal(y.grad, torch.full_like(x, 3.0))


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
