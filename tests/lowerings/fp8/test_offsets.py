"""Offsets of more than 2^31 elements, along every axis that has a stride: in Triton's interpreter, over memory that nobody touches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.fp8 import rounding
from attn_compiler.lowerings.fp8.rounding import How, Rounding
from tests.lowerings import sparse
from tests.lowerings.fp8.problems import rounding_as_hardware

pytest.importorskip("triton")

from attn_compiler.lowerings.fp8 import rounding_launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, which has to be chosen before")

PLAIN = Rounding(
    each=(
        How(format="e4m3", as_given=True),
        How(format="int8", restore="float16"),
        How(format="e4m3", turned=True, restore="float16"),
    ),
    block=128,
)
ROTATED = Rounding(each=(How(format="e4m3", rotated=True), How(format="int8", rotated=True)), block=128)


@pytest.mark.in_turns
@pytest.mark.parametrize("axis", range(3), ids="bhs")
@pytest.mark.parametrize("how", [PLAIN, ROTATED], ids=["plain", "rotated"])
def test_rounding(how: Rounding, axis: int) -> None:
    near = [torch.randn(2, 2, 150, 32).half() for _ in how.each]
    far = [sparse.apart(x, axis) for x in near]
    asked = dataclasses.replace(how, per="row")
    with rounding_as_hardware():
        found = [rounding_launch.round_fp8(x, None, [], asked.to_text()) for x in (near, far)]
        looks = [rounding_launch.largest_fp8(x, None, asked.to_text()) for x in (near, far)]
    for mine, right in zip(found[1], found[0], strict=True):
        assert torch.equal(mine.float(), right.float())
    assert torch.equal(looks[1], looks[0])


@pytest.mark.parametrize("axis", range(3), ids="bhs")
def test_means(axis: int) -> None:
    k = torch.randn(2, 2, 150, 32).half()
    torch.testing.assert_close(
        rounding_launch.mean_fp8(sparse.apart(k, axis), True), rounding._mean_in_pytorch(k, True)
    )
