"""What a warpgroup does with a tile in registers, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.shared.kernels import tiles_sm90
from tests.lowerings.shared.kernels import gluon_in_torch


@pytest.fixture
def in_torch() -> dict[str, Any]:
    return gluon_in_torch.scope(tiles_sm90, (0,), (1,))


def test_keys_up_to_a_number(in_torch: dict[str, Any]) -> None:
    most = torch.arange(-3, 61) * 3
    allowed = in_torch["up_to"](most, None)
    assert torch.equal(allowed, torch.arange(128)[None, :] <= most[:, None])


@pytest.mark.parametrize("size", [64, 128])
def test_bits_of_each_row(size: int, in_torch: dict[str, Any]) -> None:
    words = torch.randint(-(2**31), 2**31, (64, 6), dtype=torch.int64).to(torch.int32)
    found = in_torch["bits_set"](gluon_in_torch.Pointer(words.view(-1)), torch.arange(64) * 6, 2, None, size)
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    assert torch.equal(found, bits.flatten(1)[:, 64 : 64 + size] != 0)


def test_shares_add_up_to_the_sum(in_torch: dict[str, Any]) -> None:
    weights = torch.rand(64, 128)
    shares = in_torch["shares"](weights)
    assert shares.shape == (64, 4)
    torch.testing.assert_close(shares.sum(1), weights.sum(1))
    # What the tensor cores give to one thread of four: two neighbours of every eight keys.
    torch.testing.assert_close(shares[:, 1], weights.view(64, 16, 8)[:, :, 2:4].sum((1, 2)))


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_numbers_beyond_the_largest_become_it(dtype: torch.dtype, largest: float, in_torch: dict[str, Any]) -> None:
    x = torch.tensor([[0.0, 1.0, 256.0, 1e6]])
    found = in_torch["rounded"](x, types.SimpleNamespace(dtype=dtype))
    assert found.dtype == dtype
    assert found.float().tolist() == [[0.0, 1.0, 256.0, largest]]


def test_sums_of_whole_numbers_stay_what_they_are(in_torch: dict[str, Any]) -> None:
    most = 127 * 127 * 128
    sums = torch.tensor([-most, -65537, -1, 0, 1, 4097, most], dtype=torch.int32)
    assert in_torch["as_numbers"](sums).tolist() == sums.tolist()
    assert in_torch["as_numbers"](sums.float()).dtype == torch.float32
