"""The kernels of linear attention in Triton's interpreter: forward, backward, by channel, and pieces of tiles."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.linear.kernels.pieces import join_pieces
from attn_compiler.passes.matching.linear import draws
from tests.lowerings.linear.triton_problems import FORMS, SIZES, furthest, problem
from tests.thinned import further

pytest.importorskip("triton")


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("sort", further(draws.SORTS, daily=draws.SORTS[:1]))
def test_results_states_and_gradients_are_the_recurrence(
    name: str, sizes: tuple[int, int, int, int, int], sort: str
) -> None:
    torch.manual_seed(0)
    found = furthest(FORMS[name], problem(FORMS[name], sizes, sort=sort))
    assert max(found.pop("out"), found.pop("last")) < 5e-6, found
    # By channel the gradient of g is a difference of sums that hold v. Of a single token it is the state's alone, beside values of 1e3.
    if name == "channel" and sizes[0] == 1 and sort == "unusual":
        assert found.pop("g") < 1e-3
    assert max(found.values()) < 2e-5, found


def test_equal_keys_without_decay_are_no_trouble() -> None:
    """Powers of the triangle of 64 such rows would be far beyond float32."""
    form = FORMS["delta"]
    given = dict(zip(form.roles, problem(form, (128, 1, 1, 16, 16)), strict=True))
    with torch.no_grad():
        given["k"][:] = given["k"][:, :1]
        given["beta"].fill_(1.0)
        given["g"].zero_()
    assert max(furthest(form, list(given.values())).values()) < 2e-5


# States between pieces are those of one piece after the other, forwards and backwards.
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
