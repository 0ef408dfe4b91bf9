from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_compiler.lowerings import fp8_nodes, fp8_rounding
from attn_compiler.lowerings.fp8_rounding import How, Per, Rounding
from tests.lowerings.fp8_problems import Eager

B, H, S, D = 2, 3, 40, 32


def nodes(x: torch.Tensor, largest: torch.Tensor, how: How, per: Per | None = None) -> Any:
    emitter: Any = Eager()
    given: Any = (x, largest)
    return fp8_nodes.rounded(emitter, *given, how, per)


@pytest.mark.parametrize("form", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_they_give_what_the_op_gives(form: str, per: Per) -> None:
    """Also of what is not finite, of what exceeds the scale, and of a magnitude of 0."""
    torch.manual_seed(0)
    x, how = torch.randn(B, H, S, D).bfloat16(), How(format=form, margin=1)
    x[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    largest = torch.tensor([2.0, 0.0, 5.0])[None, :, None] if per == "head" else torch.full((1, 1, 1), 2.0)
    found = nodes(x, largest, how, per)
    rounded, descale, _, newest = torch.ops.attn_compiler.round_fp8(
        [x], None, [largest], Rounding(each=(how,), block=128, per=per).to_text()
    )
    assert found.x8.dtype == rounded.dtype
    torch.testing.assert_close(found.x8.float(), rounded.float(), equal_nan=True)
    torch.testing.assert_close(found.descale, descale)
    torch.testing.assert_close(found.newest, newest)
    assert fp8_rounding.count(x, per) == newest.numel()


def test_magnitudes_are_found_where_they_are_asked_for() -> None:
    assert nodes(torch.ones(B, H, S, D), torch.ones(1, 1, 1), How(format="e4m3")).newest is None


def test_rounded_numbers_lie_as_they_did() -> None:
    x = torch.ones(B, S, H, D).transpose(1, 2)
    assert nodes(x, torch.ones(1, 1, 1), How(format="e4m3")).x8.stride() == x.stride()
