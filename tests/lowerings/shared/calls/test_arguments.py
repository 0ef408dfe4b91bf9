from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

pytest.importorskip("triton", reason="the kernels' arguments are made with Triton: pip install triton")

from attn_compiler.lowerings.shared.calls.arguments import alignment, along, check_lengths, head_dim_parts, is_far
from attn_compiler.lowerings.shared.launching.imagined import Addresses


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (17, (32, 0)),
        (40, (32, 16)),
        (64, (64, 0)),
        (72, (64, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (112, (128, 0)),
        (160, (128, 32)),
        (192, (128, 64)),
        (256, (256, 0)),
        (257, (256, 16)),
        (320, (256, 64)),
        (384, (256, 128)),
        (385, (256, 256)),
        (512, (256, 256)),
    ],
)
def test_a_head_dim_is_computed_in_powers_of_two(head_dim: int, parts: tuple[int, int]) -> None:
    assert head_dim_parts(head_dim) == parts


def test_parts_cover_the_head_dim_and_no_more_than_the_next_power() -> None:
    for head_dim in range(1, 513):
        first, second = head_dim_parts(head_dim)
        assert head_dim <= first + second <= max(16, 2 * head_dim), head_dim
        assert all(part == 0 or (256 >= part >= 16 and part & (part - 1) == 0) for part in (first, second)), head_dim


def test_vectors_are_loaded_where_everything_begins_at_one() -> None:
    x = torch.empty(2, 30, 4, 72, dtype=torch.bfloat16).transpose(1, 2)
    assert alignment(x) == 8
    assert alignment(x.float()) == 4
    # A head dim of 36 elements of 2 bytes, and a slice that begins at an odd element.
    assert alignment(torch.empty(2, 4, 30, 36, dtype=torch.bfloat16)) == 1
    assert alignment(torch.empty(2, 30, 4, 73, dtype=torch.bfloat16)[..., 1:]) == 1
    assert alignment(x, torch.empty(2, 4, 30, 36, dtype=torch.bfloat16)) == 1


def test_the_stride_of_an_axis_of_size_one_says_nothing() -> None:
    x = torch.empty(1, 4, 30, 64, dtype=torch.bfloat16)
    assert alignment(x.as_strided(x.shape, (3, *x.stride()[1:]))) == 8


def _symbolic(*shape: int) -> torch.Tensor:
    """Of bfloat16, all sizes but those of heads symbolic, at the start of its memory."""
    env = ShapeEnv()
    dims = [DimDynamic.DYNAMIC if dim in (0, 2) else DimDynamic.STATIC for dim in range(4)]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    x = torch.empty(shape, dtype=torch.bfloat16)
    return FakeTensorMode(shape_env=env).from_tensor(
        x, static_shapes=False, symbolic_context=context, source=ConstantSource("x")
    )


def test_symbolic_sizes_are_what_all_of_them_are_and_add_no_guard() -> None:
    x = _symbolic(2, 3, 48, 24)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    with Addresses():
        # A head of s · 24 elements begins at a multiple of 8 of them; one of s · 3 · 12 does not for an odd s.
        assert alignment(x, turned) == 8
        assert alignment(_symbolic(2, 3, 48, 12)) == 1
    assert isinstance(along(x, 1), torch.SymInt)
    assert not is_far(x)
    # Positions are as far apart as there are sequences.
    assert is_far(x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3))
    check_lengths(x, x)
    assert not x.shape[0].node.shape_env.guards  # type: ignore[attr-defined]


def test_a_size_that_may_be_one_has_a_stride() -> None:
    assert along(torch.empty(1, 4, 3, 8), 0) == 0
    assert along(torch.empty(2, 4, 3, 8), 0) == 96
    assert isinstance(along(_symbolic(2, 3, 48, 24), 0), torch.SymInt)
