"""Which pairs of a tile are allowed, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import forward_masks_sm90
from tests.lowerings.shared.kernels import gluon_in_torch
from tests.lowerings.shared.kernels.gluon_in_torch import Pointer

QUERIES, KEYS, WORDS = 64, 256, 16
NOTHING: dict[str, Any] = dict.fromkeys(("Rows", "Keys", "DocumentsQ", "DocumentsK", "Slopes", "Bits"))
HOW = types.SimpleNamespace(BLOCK_M=128, BLOCK_N=128, HAS_LEFT=False, HAS_RIGHT=False)


@pytest.fixture
def functions() -> dict[str, Any]:
    return gluon_in_torch.scope(forward_masks_sm90, (0,), (1,))


def _own(**given: Any) -> Any:
    least, most = torch.zeros(QUERIES, dtype=torch.int64), torch.full((QUERIES,), KEYS - 1)
    return types.SimpleNamespace(**{"least": least, "most": most, "document": None, "bits": None} | given)


@pytest.mark.parametrize("tile", [0, 1])
def test_bits_of_a_dense_mask(tile: int, functions: dict[str, Any]) -> None:
    allowed = torch.rand(QUERIES, KEYS) < 0.5
    words = torch.zeros(QUERIES, WORDS, dtype=torch.int64)
    for key in range(KEYS):
        words[:, key // 32] |= allowed[:, key].long() << (key % 32)
    masks = types.SimpleNamespace(**NOTHING | {"Bits": Pointer(words.to(torch.int32).view(-1))})
    own = _own(bits=torch.arange(QUERIES) * WORDS)
    found = functions["masked"](torch.zeros(QUERIES, 128), tile, own, masks, KEYS, None, HOW)
    assert torch.equal(found == 0.0, allowed[:, tile * 128 :][:, :128])


def test_keys_from_the_first_to_the_last(functions: dict[str, Any]) -> None:
    at = torch.arange(QUERIES)
    masks = types.SimpleNamespace(**NOTHING)
    own = _own(least=at + 120, most=at + 140)
    how = types.SimpleNamespace(**vars(HOW) | {"HAS_LEFT": True})
    found = functions["masked"](torch.zeros(QUERIES, 128), 1, own, masks, KEYS, None, how)
    keys = torch.arange(128, 256)
    assert torch.equal(found == 0.0, (keys >= at[:, None] + 120) & (keys <= at[:, None] + 140))


def test_queries_of_a_warpgroup_and_the_keys_of_their_band(functions: dict[str, Any]) -> None:
    sizes = types.SimpleNamespace(seqlen_q=300, seqlen_kv=KEYS, band_left=10, band_right=torch.tensor(5))
    how = types.SimpleNamespace(**vars(HOW) | {"HAS_LEFT": True, "HAS_RIGHT": True})
    masks = types.SimpleNamespace(**NOTHING)
    masking = types.SimpleNamespace(rows_b=0, rows_side=0)
    rows, least, most = functions["keys_of"](1, torch.tensor(1), torch.tensor(0), masks, masking, sizes, None, how)
    assert torch.equal(rows, torch.arange(192, 256))
    assert torch.equal(least, rows - 10)
    assert torch.equal(most, (rows + 5).clamp(max=KEYS - 1))
