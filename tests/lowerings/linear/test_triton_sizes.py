"""Sizes of tiles, and how tensors lie."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.linear import triton_sizes
from attn_compiler.lowerings.linear.triton_sizes import LinearSizes
from tests.lowerings.linear import linear_forms


def _sizes(length: int = 90, dim_k: int = 128, dim_v: int = 128, *, is_half: bool = True) -> LinearSizes:
    q, v = torch.empty(2, length, 2, dim_k), torch.empty(2, length, 6, dim_v)
    return LinearSizes.of(q, v, is_half=is_half)


@pytest.mark.parametrize(("dim", "width"), [(1, 16), (16, 16), (17, 32), (64, 64), (96, 128), (200, 256)])
def test_tiles_are_powers_of_2_that_tensor_cores_take(dim: int, width: int) -> None:
    assert triton_sizes.wide(dim) == width


def test_wide_heads_have_small_tiles() -> None:
    usual, wide = _sizes(), _sizes(dim_k=129)
    assert (usual.chunk, usual.columns, usual.blocks) == (64, 32, 4)
    assert (wide.chunk, wide.columns, wide.blocks) == (32, 16, 8)
    assert _sizes(dim_v=5).columns == 16


@pytest.mark.parametrize(("length", "chunks"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_a_chunk_may_be_begun(length: int, chunks: int) -> None:
    assert _sizes(length).chunks == chunks


def test_products_have_parts_where_all_is_bfloat16() -> None:
    half, single = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    assert triton_sizes.in_half(half, half)
    assert not triton_sizes.in_half(half, single)
    assert not triton_sizes.in_half(half.half())
    assert _sizes().in_parts((3, 4, 5), single).shape == (3, 3, 4, 5)
    assert _sizes(is_half=False).in_parts((3, 4, 5), single).dtype == torch.float32
    assert (_sizes().numbers["PLANES"], _sizes(is_half=False).numbers["PLANES"]) == (3, 1)
    assert (_sizes().numbers["OF_ROWS"], _sizes(is_half=False).numbers["OF_ROWS"]) == (2, 0)


def test_only_the_last_axis_has_to_lie_side_by_side() -> None:
    x = torch.empty(2, 3, 4).mT
    assert triton_sizes.readable(x, last=False) is x
    assert triton_sizes.readable(x, last=True).stride(-1) == 1
    assert triton_sizes.readable(x.mT, last=True).stride() == (12, 4, 1)


def test_strides_have_the_letters_of_axes() -> None:
    named = {"q": torch.empty(2, 3, 4, 5)}
    found = triton_sizes.strides(named, {"q": "bsh", "k": "b"})
    assert found == {"q_b": 60, "q_s": 20, "q_h": 5, "k_b": 0}


def test_a_state_of_the_state_space_lies_the_other_way_round() -> None:
    state = torch.empty(2, 3, 4, 5)
    of = triton_sizes.state_strides
    assert of(linear_forms.DELTA, state, "x") == {"x_b": 60, "x_h": 20, "x_k": 5, "x_v": 1}
    assert of(linear_forms.STATE_SPACE, state, "x") == {"x_b": 60, "x_h": 20, "x_v": 5, "x_k": 1}
    assert of(dataclasses.replace(linear_forms.DELTA), None, "x") == {"x_b": 0, "x_h": 0, "x_k": 0, "x_v": 0}
