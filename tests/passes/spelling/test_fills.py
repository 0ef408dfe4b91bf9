"""What shuts a key out: against a softmax that really is computed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_compiler.index_expr.reach import Reach
from attn_compiler.passes.spelling.fills import shuts_out

NOTHING = Reach()
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("fills", "added", "scores", "shut"),
    [
        ([], NOTHING, 100.0, True),
        ([-math.inf], Reach(low=-1e9, high=1e9), 1e9, True),
        ([-1e9], NOTHING, 16384.0, True),
        ([-65504.0], NOTHING, 16384.0, True),
        ([-65504.0], NOTHING, 32700.0, False),
        ([-1e9], Reach(high=1e9), 1.0, False),
        ([-1e9], Reach(high=9e8), 1.0, True),
        ([-65504.0], Reach(low=-65000.0), 300.0, False),
        ([-65504.0, -math.inf], Reach(low=-1e4), 300.0, True),
        ([LOWEST], Reach(low=-1e9, high=1e9), 1e6, True),
        ([LOWEST, -math.inf], NOTHING, 1.0, True),
        ([LOWEST, torch.finfo(torch.bfloat16).min], NOTHING, 1.0, True),
        ([-1e9, -1e6], NOTHING, 1.0, False),
        ([-1e9, -1e9], NOTHING, 1.0, True),
        ([-1e9, LOWEST], NOTHING, 1.0, False),
    ],
)
def test_what_shuts_out(fills: list[float], added: Reach, scores: float, shut: bool) -> None:
    assert shuts_out(fills, added, scores) == shut


NUMBERS = st.floats(-2e5, 2e5)


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e6, -1.0), NUMBERS, NUMBERS, st.floats(0.0, 5e4))
def test_what_is_shut_out_has_no_weight(fill: float, one: float, other: float, scores: float) -> None:
    """The worst that can come: the filled key gets the highest of all else, the other one the lowest."""
    added = Reach(low=min(one, other), high=max(one, other))
    logits = torch.tensor([fill + added.high + scores, added.low - scores], dtype=torch.float64)
    weight = float(logits.softmax(0)[0])
    if shuts_out([fill], added, scores):
        assert weight < 1e-40
    elif weight == 0.0:
        # Not for want of trying, but for what float64 has beyond float32's exponentials.
        assert float(logits[1] - logits[0]) > 100.0
    if float(logits[1] - logits[0]) > 111.0:
        assert shuts_out([fill], added, scores)
