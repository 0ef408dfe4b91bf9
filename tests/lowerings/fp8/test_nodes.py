from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_compiler.lowerings.fp8 import nodes as fp8_nodes
from attn_compiler.lowerings.fp8.rounding import How, Rounding
from tests.lowerings.fp8.problems import Eager

B, H, S, D = 2, 3, 40, 32


def nodes(x: torch.Tensor, how: How) -> Any:
    emitter: Any = Eager()
    given: Any = x
    return fp8_nodes.rounded(emitter, given, how)


@pytest.mark.parametrize("form", ["e4m3", "e5m2", "int8"])
def test_they_give_what_the_op_gives(form: str) -> None:
    """Also of what is not finite, and of what exceeds the scale."""
    torch.manual_seed(0)
    x, how = torch.randn(B, H, S, D).bfloat16(), How(format=form, magnitude=1.75)
    x[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rounded, descale = nodes(x, how)
    of_op = torch.ops.attn_compiler.round_fp8([x], None, [], Rounding(each=(how,), block=128).to_text())
    assert rounded.dtype == of_op[0].dtype
    torch.testing.assert_close(rounded.float(), of_op[0].float(), equal_nan=True)
    torch.testing.assert_close(descale, of_op[1])


def test_rounded_numbers_lie_as_they_did() -> None:
    x = torch.ones(B, S, H, D).transpose(1, 2)
    assert nodes(x, How(format="e4m3", magnitude=1.0))[0].stride() == x.stride()


def test_without_a_magnitude_it_is_the_op_s() -> None:
    with pytest.raises(ValueError, match="known beforehand"):
        nodes(torch.ones(B, H, S, D), How(format="e4m3"))
