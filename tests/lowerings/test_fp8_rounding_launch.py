"""The kernels that round and look for magnitudes, against plain PyTorch: in Triton's interpreter and on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings import fp8_rounding
from attn_compiler.lowerings.fp8_rounding import How, Rounding
from tests.lowerings.fp8_problems import rounding_as_hardware

pytest.importorskip("triton")

from attn_compiler.lowerings import fp8_rounding_launch

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
