"""The weights of a tile in the backward, (keys, queries), run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import grad_tiles_sm90
from tests.lowerings.shared.kernels import gluon_in_torch

KEYS, QUERIES, START = 64, 64, 128
LAYOUTS = types.SimpleNamespace(SCORES=None, SUM=None)
SIZES = types.SimpleNamespace(seqlen_q=START + QUERIES)
NO_MASKS = types.SimpleNamespace(Rows=None, rows_side=0, Documents=None, Bits=None)


def scope() -> dict[str, Any]:
    return gluon_in_torch.scope(grad_tiles_sm90, (0,), (1,))


def own(keys: Tensor, **further: Any) -> types.SimpleNamespace:
    """A warpgroup's keys. least, most: of the queries that each key is used by."""
    given = {"least": keys * 0, "most": keys * 0 + 10**6, "document": None, "slope": None, "factor": 0.5, "cap": 0.0}
    return types.SimpleNamespace(keys=keys, **{**given, **further})


def how(**further: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{"BLOCK_M": QUERIES, "HAS_RIGHT": False, "SOFTCAP": False, **further})


def weights(mine: types.SimpleNamespace, masks: Any = NO_MASKS, *, masked: bool = True, **further: Any) -> Any:
    """Weights, their multiplier for gradients, scores and base."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(KEYS, QUERIES, generator=generator)
    base = torch.randn(QUERIES, generator=generator)
    found = scope()["weights_of"](scores, START, masked, base, None, mine, masks, SIZES, LAYOUTS, how(**further))
    return *found, scores, base


def test_without_a_mask() -> None:
    found, through, scores, base = weights(own(torch.arange(KEYS)), masked=False)
    torch.testing.assert_close(found, torch.exp2(scores * 0.5 + base))
    assert through is found


def test_a_diagonal_leaves_out_earlier_queries_and_a_window_later_ones() -> None:
    keys = torch.arange(KEYS) + 150
    found, _, scores, base = weights(own(keys, least=keys, most=keys + 20), HAS_RIGHT=True)
    at = torch.arange(QUERIES) + START
    allowed = (at >= keys[:, None]) & (at <= keys[:, None] + 20)
    torch.testing.assert_close(found, torch.exp2(scores * 0.5 + base).where(allowed, 0.0))
    assert allowed.any()
    assert not allowed.all()


def test_intervals_and_documents_of_queries() -> None:
    keys, at = torch.arange(KEYS), torch.arange(START + QUERIES)
    rows = torch.stack((at % 7, 30 + at % 11)).to(torch.int32)
    documents = (at // 13).to(torch.int32)
    of_keys = ((keys + START) // 13).to(torch.int32)
    masks = types.SimpleNamespace(
        Rows=gluon_in_torch.Pointer(rows.view(-1)),
        rows_side=rows.shape[1],
        Documents=gluon_in_torch.Pointer(documents),
        Bits=None,
    )
    found, _, scores, base = weights(own(keys, document=of_keys), masks)
    lower, upper = rows[:, START:]
    allowed = (keys[:, None] >= lower) & (keys[:, None] < upper) & (of_keys[:, None] == documents[START:])
    torch.testing.assert_close(found, torch.exp2(scores * 0.5 + base).where(allowed, 0.0))
    assert allowed.any()
    assert not allowed.all()


def test_a_softcap_shrinks_what_goes_through() -> None:
    found, through, scores, base = weights(own(torch.arange(KEYS), cap=3.0), masked=False, SOFTCAP=True)
    capped = torch.tanh(scores * 0.5)
    torch.testing.assert_close(found, torch.exp2(capped * 3.0 + base), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(through, found * (1 - capped**2), rtol=1e-4, atol=1e-5)


def test_slopes_add_by_the_distance() -> None:
    keys = torch.arange(KEYS) + START - 20
    found, _, scores, base = weights(own(keys, slope=0.01), masked=False)
    distance = keys[:, None] - (torch.arange(QUERIES) + START)
    torch.testing.assert_close(found, torch.exp2(scores * 0.5 + base + 0.01 * distance))
