"""The softmax of one tile after the other, run in PyTorch (gluon_in_torch.py): as that of all of them at once."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import forward_softmax_sm90
from tests.lowerings.shared.kernels import gluon_in_torch
from tests.lowerings.shared.kernels.gluon_in_torch import Pointer

ROWS, KEYS, TILES, SCALE = 64, 64, 3, 0.3
HOW = types.SimpleNamespace(BLOCK_N=KEYS, SOFTCAP=False, HAS_LEFT=False, LOW_AGAIN=False)
NOTHING: dict[str, Any] = dict.fromkeys(("Rows", "Keys", "DocumentsQ", "DocumentsK", "Slopes", "Bits"))


@pytest.mark.parametrize("sink", [None, 1.5])
def test_tiles_one_after_the_other(sink: float | None) -> None:
    functions = gluon_in_torch.scope(forward_softmax_sm90, (0,), (1,))
    qk = 4 * torch.randn(ROWS, TILES * KEYS, generator=torch.Generator().manual_seed(0))
    most = torch.arange(ROWS) + 90
    most[3] = -1
    own = types.SimpleNamespace(factor=SCALE / math.log(2), slope=None, most=most, document=None, bits=None)
    masks = types.SimpleNamespace(**NOTHING)
    peak, total, out = torch.full((ROWS,), -1e30), torch.zeros(ROWS, 4), torch.zeros(ROWS, TILES * KEYS)
    for tile in range(TILES):
        part = slice(tile * KEYS, (tile + 1) * KEYS)
        weights, peak, total, decay = functions["softmax"](
            qk[:, part], None, tile, peak, total, own, masks, TILES * KEYS, True, None, HOW
        )
        out = out * decay[:, None]
        out[:, part] = weights
    Sinks = None if sink is None else Pointer(torch.tensor([0.0, sink]))
    scale, lse, is_empty = functions["divided"](peak, total, Sinks, torch.tensor(1), None, HOW)
    scores = torch.where(torch.arange(TILES * KEYS) <= most[:, None], qk * SCALE, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, torch.full((ROWS, 1), sink)], 1)
    assert is_empty.tolist() == [row == 3 for row in range(ROWS)]
    right = scores.softmax(1).nan_to_num(0)[:, : TILES * KEYS]
    torch.testing.assert_close(out * scale[:, None], right, atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, scores.logsumexp(1), atol=1e-5, rtol=0)
