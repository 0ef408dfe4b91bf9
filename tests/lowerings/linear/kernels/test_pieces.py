"""States between pieces are those of one piece after the other, forwards and backwards."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attn_compiler.lowerings.linear.kernels.pieces import join_pieces

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_ROWS, _PIECES, _DIM, _WIDE = 6, 3, 16, 32


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("has_edge", [False, True])
def test_pieces_are_joined_in_their_order(is_reversed: bool, has_edge: bool) -> None:
    torch.manual_seed(0)
    both = torch.randn(_ROWS, _PIECES, _DIM, _WIDE, device=DEVICE)
    edge = torch.randn(_ROWS // 2, 2, _DIM, _DIM, device=DEVICE) if has_edge else None
    between = torch.empty(_ROWS, _PIECES, _DIM, _DIM, device=DEVICE)
    strides = (0, 0, 0, 0) if edge is None else edge.stride()
    join_pieces[(_ROWS,)](
        both, both, both, edge, between, 2, 9, _PIECES, 3, *strides,
        C=16, DK=_DIM, WK=_DIM, DV=_DIM, WV=_DIM, BV=_DIM, LOCAL=_WIDE, WIDE=_WIDE, DELTA=True, REVERSED=is_reversed, PARTS=0,
    )  # fmt: skip
    state = torch.zeros(_ROWS, _DIM, _DIM, device=DEVICE) if edge is None else edge.flatten(0, 1)
    for piece in reversed(range(_PIECES)) if is_reversed else range(_PIECES):
        torch.testing.assert_close(between[:, piece], state, rtol=1e-4, atol=1e-4)
        local, whole = both[:, piece].split(_DIM, -1)
        state = (whole.mT if is_reversed else whole) @ state + local


def test_without_the_delta_rule_a_piece_decays_the_state() -> None:
    torch.manual_seed(0)
    local = torch.randn(_ROWS, _PIECES, _DIM, _DIM, device=DEVICE)
    sums = -torch.rand(_ROWS, 8, 2, 16, device=DEVICE)
    between = torch.empty(_ROWS, _PIECES, _DIM, _DIM, device=DEVICE)
    join_pieces[(_ROWS,)](
        local, None, sums, None, between, 2, 8, _PIECES, 3, 0, 0, 0, 0,
        C=16, DK=_DIM, WK=_DIM, DV=_DIM, WV=_DIM, BV=_DIM, LOCAL=_DIM, WIDE=_DIM, DELTA=False, REVERSED=False, PARTS=0,
    )  # fmt: skip
    state = torch.zeros(_ROWS, _DIM, _DIM, device=DEVICE)
    for piece in range(_PIECES):
        torch.testing.assert_close(between[:, piece], state)
        decay = sums[:, 3 * piece : 3 * piece + 3, 0, -1].sum(1).exp()
        state = state * decay[:, None, None] + local[:, piece]
