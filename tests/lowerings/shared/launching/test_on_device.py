"""On any device; what is asked of a GPU beside another is in the tests of the lowerings."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.shared.launching.on_device import Empty, new_outputs, on
from attn_compiler.lowerings.shared.ops import leaf_ops as ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7, 4), (1, 1, 1, 8, 8)])
def test_outputs_lie_as_every_family_s(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, seqlen_q, head_dim, head_dim_v = sizes
    q = torch.empty(batch, heads, seqlen_q, head_dim, dtype=dtype)
    v = torch.empty(batch, heads, 9, head_dim_v, dtype=dtype)
    for found, expected in zip(new_outputs(q, v), ops.empty_outputs(q, v), strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert [s for s, n in zip(found.stride(), found.shape, strict=True) if n > 1] == [
            s for s, n in zip(expected.stride(), expected.shape, strict=True) if n > 1
        ]


def test_what_is_allocated_lies_as_the_first() -> None:
    first = torch.empty(3, 5, 4, dtype=torch.float16).transpose(0, 1)
    found = Empty.like(first).make()
    assert found.data_ptr() != first.data_ptr()
    assert (found.shape, found.stride(), found.dtype) == (first.shape, first.stride(), first.dtype)


def test_nothing_is_switched_where_there_is_one_device() -> None:
    with on(torch.device("cpu")) as switched:
        assert switched is None
