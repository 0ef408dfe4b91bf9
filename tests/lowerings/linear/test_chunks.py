"""The recurrence by chunks gives what it gives token by token: outputs, the last state and all gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from attn_compiler.lowerings.graph_ops.linear_recurrence import LinearOperands, token_by_token
from attn_compiler.lowerings.linear.chunks import by_chunks
from tests.lowerings.linear import linear_problems

_CASES = [*itertools.product((False, True), (False, True), (1, 5, 64, 150), (False, True))]


@pytest.mark.parametrize(("channel", "delta", "length", "has_state"), _CASES)
def test_chunks_are_as_tokens(channel: bool, delta: bool, length: int, has_state: bool) -> None:
    given = linear_problems.prepared(channel=channel, delta=delta, length=length, has_state=has_state)
    outs, grads = linear_problems.furthest(
        lambda: by_chunks(given), lambda: token_by_token(given), linear_problems.operands(given)
    )
    assert outs < 1e-12
    assert grads < 1e-11


def test_a_decay_that_forgets_all_gives_no_infinity() -> None:
    given = linear_problems.prepared(channel=True, delta=True, length=80, has_state=False, dtype=torch.float32)
    strong = LinearOperands(q=given.q, k=given.k, v=given.v, g=given.g.detach() * 500, beta=given.beta)
    out, last = by_chunks(strong)
    assert bool(out.isfinite().all())
    assert bool(last.isfinite().all())
    torch.testing.assert_close((out, last), token_by_token(strong), rtol=1e-4, atol=1e-5)
