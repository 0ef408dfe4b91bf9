"""Tensors are rounded to FP8 by the kernels as by PyTorch's ops."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attn_compiler import Fp8Recipe
from attn_compiler.lowerings.fp8 import rounding, rounding_launch
from attn_compiler.lowerings.fp8.rounding import How, Rounding
from tests.lowerings.fp8.problems import rounding_as_hardware

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


# The kernels that round and look for magnitudes, against plain PyTorch.
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter, which has to be chosen before"
)

CASES = {
    "block": Rounding(each=(How(format="e4m3"),), block=128),
    "blocks of two parts": Rounding(each=(How(format="e4m3", margin=1, restore="float16"),), block=256),
    "turned": Rounding(each=(How(format="e4m3", turned=True, restore="float16"),), block=128),
    "int8": Rounding(each=(How(format="int8", restore="float16"),), block=128),
    "e5m2": Rounding(each=(How(format="e5m2", as_given=True),), block=128),
    "three": Rounding(
        each=(How(format="int8"), How(format="e4m3", has_mean=True), How(format="e4m3", turned=True)), block=128
    ),
    "a shift": Rounding(
        each=(How(format="e4m3", has_shift=True, restore="float16"), How(format="int8", has_mean=True)), block=128
    ),
}
#: of head dims that are powers of two
ROTATED = {
    "rotated": Rounding(each=(How(format="e4m3", rotated=True),), block=128),
    "rotated blocks of two parts": Rounding(each=(How(format="e4m3", rotated=True),), block=256),
    "accurate, a shift": Rounding(
        each=(
            How(format="int8", rotated=True, has_shift=True),
            How(format="int8", rotated=True, has_mean=True),
            How(format="e4m3", turned=True),
        ),
        block=128,
    ),
    "rotated, a shift": Rounding(
        each=(How(format="e4m3", rotated=True, has_shift=True), How(format="e4m3", rotated=True, has_mean=True)),
        block=128,
    ),
    "accurate": Rounding(
        each=(
            How(format="int8", rotated=True),
            How(format="int8", rotated=True, has_mean=True),
            How(format="e4m3", turned=True),
        ),
        block=128,
    ),
    "accurate, in inference": Rounding(
        each=(
            How(format="e5m2", rotated=True),
            How(format="e4m3", rotated=True, has_mean=True),
            How(format="e4m3", turned=True),
        ),
        block=128,
    ),
}
PER: tuple[rounding.Per, ...] = ("tensor", "head", "row")


def given(device: str = "cpu", dtype: torch.dtype = torch.float16, head_dim: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(B, S, H, head_dim, generator=generator).transpose(1, 2)
    x[0, 0, :128] *= 20
    x[1, 1, 128:256] = 0
    x[0, 1, 5, 7], x[0, 1, 6, 7] = torch.nan, torch.inf
    return x.to(device, dtype)


def tensors(how: Rounding, x: Tensor) -> list[Tensor]:
    """Of different sizes."""
    return [x, x[:, :2, :200] * 3, x[:1, 1:, 50:] + 1][: len(how.each)]


def sharing_heads(how: Rounding, x: Tensor) -> list[Tensor]:
    """As `tensors`, but the first has twice as many heads as the others where its products with their mean are asked for."""
    read = tensors(how, x)
    return [torch.cat((read[1], read[1] + 1), 1), *read[1:]] if how.each[0].has_shift else read


def extras(how: Rounding, given: list[Tensor]) -> list[tuple[Tensor | None, list[Tensor]]]:
    """A mean, and magnitudes."""
    wide = given[min(1, len(given) - 1)]
    mean = rounding._mean_in_pytorch(wide, how.each[0].rotated)
    of_rows = [1 + torch.arange(x[:, :, 0, 0].numel(), device=x.device).view(*x.shape[:2], 1).float() for x in given]
    found = [(None, []), (mean, []), (None, of_rows), (mean, [x[:1, :1].contiguous() for x in of_rows])]
    return [each for each in found if each[0] is not None or not how.each[0].has_shift]


def assert_same(mine: list[Tensor], right: list[Tensor], how: Rounding) -> None:
    """Where a quotient is rounded otherwise, a number may be the next one: seldom. A sum of such is a little off. What is not finite is
    rare, too, and has to be the same."""
    if how.each[0].has_shift:
        *mine, shift = mine
        *right, wanted = right
        assert torch.equal(shift.isnan(), wanted.isnan())
        assert float((shift - wanted).nan_to_num().norm()) < 0.01 * float(wanted.nan_to_num().norm())
    for got, expected in zip(mine, right, strict=True):
        assert got.dtype == expected.dtype
        assert got.stride() == expected.stride()
        numbers, wanted = got.float(), expected.float()
        assert torch.equal(numbers.isnan(), wanted.isnan())
        same = torch.isclose(numbers, wanted, rtol=2e-3, atol=1e-6, equal_nan=True)
        assert float(same.double().mean() if same.numel() else 1.0) > 0.999


@pytest.mark.in_turns(2)
@interpreted
@pytest.mark.parametrize("name", [*CASES, *ROTATED])
def test_the_kernel_gives_what_pytorch_gives(name: str) -> None:
    how = (CASES | ROTATED)[name]
    read = sharing_heads(how, given(head_dim=D if name in CASES else 32))
    for mean, largest in extras(how, read):
        for per in (None, *(PER if largest else ())):
            asked = dataclasses.replace(how, per=per)
            with rounding_as_hardware():
                mine = rounding_launch.round_fp8(read, mean, largest, asked.to_text())
            assert_same(mine, rounding._round_in_pytorch(read, mean, largest, asked), asked)


@interpreted
@pytest.mark.parametrize("head_dim", [16, 256])
def test_a_rotation_of_few_and_of_many_rows(head_dim: int) -> None:
    """Wider ones than tensor cores have room for are made of two."""
    how = ROTATED["accurate"]
    read = [x[:1] for x in sharing_heads(how, given(head_dim=head_dim))]
    mean = rounding._mean_in_pytorch(read[1], True)
    with rounding_as_hardware():
        mine = rounding_launch.round_fp8(read, mean, [], how.to_text())
    assert_same(mine, rounding._round_in_pytorch(read, mean, [], how), how)


@interpreted
@pytest.mark.parametrize("name", ["three", "accurate"])
def test_magnitudes_that_are_known_take_no_look_and_no_tensor(name: str) -> None:
    how = (CASES | ROTATED)[name]
    each = tuple(dataclasses.replace(one, magnitude=2.0 + i) for i, one in enumerate(how.each))
    how = dataclasses.replace(how, each=each)
    read = sharing_heads(how, given(head_dim=32))
    mean = rounding._mean_in_pytorch(read[1], how.each[0].rotated)
    with rounding_as_hardware():
        mine = rounding_launch.round_fp8(read, mean, [], how.to_text())
    assert_same(mine, rounding._round_in_pytorch(read, mean, [], how), how)
    scales = [float(x) for x in mine[1 : 3 * rounding.EACH : rounding.EACH]]
    assert scales == pytest.approx([(2.0 + i) / one.largest for i, one in enumerate(each)])


@pytest.mark.in_turns
@interpreted
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("name", ["blocks of two parts", "three", "accurate"])
def test_the_largest_magnitudes_are_those_of_what_is_finite(name: str, per: rounding.Per) -> None:
    how = dataclasses.replace((CASES | ROTATED)[name], per=per)
    read = sharing_heads(how, given(head_dim=D if name in CASES else 32))
    for mean, _ in extras(how, read)[:2]:
        mine = rounding_launch.largest_fp8(read, mean, how.to_text())
        torch.testing.assert_close(mine, rounding._largest_in_pytorch(read, mean, how))
        assert mine.shape == rounding._fake_largest(read, mean, how.to_text()).shape


@interpreted
@pytest.mark.parametrize("length", [0, 5, 300, 9000])
@pytest.mark.parametrize("rotated", [False, True])
def test_the_mean_is_that_of_what_is_finite(rotated: bool, length: int) -> None:
    k = given(head_dim=D if not rotated else 64).repeat(1, 1, 30, 1)[:1, 1:, :length]
    mine = rounding_launch.mean_fp8(k, rotated)
    right = rounding._mean_in_pytorch(k, rotated)
    assert mine.stride() == right.stride() == rounding._fake_mean(k, rotated).stride()
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@interpreted
def test_a_mean_that_overflows_is_none() -> None:
    k = torch.full((1, 1, 100, 16), 3e38, dtype=torch.bfloat16)
    assert not rounding_launch.mean_fp8(k, True).any()


#: each compiles some kernels of its own
ON_A_GPU = [
    *((name, 128) for name in CASES),
    *(("three", head_dim) for head_dim in (D, 64, 256)),
    *((name, head_dim) for name in ROTATED for head_dim in (64, 128)),
    ("accurate", 256),
    ("accurate, a shift", 16),
    ("rotated, a shift", 16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "head_dim"), ON_A_GPU)
def test_on_a_gpu_too(name: str, head_dim: int) -> None:
    how = (CASES | ROTATED)[name]
    read = sharing_heads(how, given("cuda", torch.bfloat16, head_dim=head_dim))
    every = extras(how, read)
    for mean, largest in (every[0], every[-1]):
        asked = dataclasses.replace(how, per="head" if largest else None)
        mine = rounding.round_fp8(read, mean, largest, asked.to_text())
        assert_same(mine, rounding._round_in_pytorch(read, mean, largest, asked), asked)
    asked = dataclasses.replace(how, per="row")
    found = rounding.largest_fp8(read, mean, asked.to_text())
    # Tensor cores cut sums off.
    torch.testing.assert_close(found, rounding._largest_in_pytorch(read, mean, asked), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "length"), [(D, 300), (16, 490), (64, 9000), (128, 5), (256, 300)])
def test_on_a_gpu_the_mean_too(head_dim: int, length: int) -> None:
    k = given("cuda", torch.bfloat16, head_dim=head_dim).repeat(1, 1, 30, 1)[:, :, :length]
    for rotated in (False, *([True] if head_dim != D else [])):
        right = rounding._mean_in_pytorch(k, rotated)
        torch.testing.assert_close(rounding.mean_fp8(k, rotated), right, rtol=1e-4, atol=1e-4)
