"""Windows that need a neighbour's keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from attn_compiler.context_parallel import halo_ops as torch_halos
from attn_compiler.context_parallel.halo import Halo, most_sent, pieces
from attn_compiler.context_parallel.layout import Layout
from tests.context_parallel import against_one, models
from tests.context_parallel.against_one import Result, Run
from tests.thinned import asked_for, further

# What chunks need of their neighbours.
layouts = st.builds(Layout, size=st.integers(2, 5), balanced=st.booleans())


@st.composite
def _halos(draw: st.DrawFn) -> tuple[Layout, Halo]:
    layout, chunk = draw(layouts), draw(st.integers(1, 4))
    widest = (layout.chunks - 1) * chunk
    return layout, Halo(left=draw(st.integers(0, widest)), right=draw(st.integers(0, widest)), chunk=chunk)


@given(_halos())
def test_each_position_of_a_halo_comes_once_from_the_rank_that_has_it(drawn: tuple[Layout, Halo]) -> None:
    layout, halo = drawn
    whole = layout.chunks * halo.chunk
    for rank in range(layout.size):
        for target, chunk in enumerate(layout.chunks_of(rank)):
            first = chunk * halo.chunk
            around = [*range(first - halo.left, first), *range(first + halo.chunk, first + halo.chunk + halo.right)]
            found = [-1] * len(around)
            for sender in range(layout.size):
                for piece in pieces(layout, halo, sender, rank):
                    if piece.target != target:
                        continue
                    start = layout.chunks_of(sender)[piece.source] * halo.chunk
                    ends = [
                        *range(start + halo.chunk - halo.tail, start + halo.chunk),
                        *range(start, start + halo.head),
                    ]
                    for at in range(piece.count):
                        assert found[piece.into + at] == -1
                        found[piece.into + at] = ends[piece.start + at]
            assert found == [p if 0 <= p < whole else -1 for p in around]


@pytest.mark.parametrize(
    ("size", "balanced", "halo", "sent"),
    [
        (2, False, Halo(left=3, right=0, chunk=8), 3),
        (4, False, Halo(left=3, right=2, chunk=8), 5),
        (4, False, Halo(left=12, right=0, chunk=8), 12),
        # Rank 1 has chunks 1 and 2: what chunk 2 needs of chunk 1 stays there.
        (2, True, Halo(left=3, right=0, chunk=8), 3),
        (4, True, Halo(left=3, right=0, chunk=8), 6),
        (4, False, Halo(left=0, right=0, chunk=8), 0),
    ],
)
def test_what_the_busiest_rank_sends(size: int, balanced: bool, halo: Halo, sent: int) -> None:
    assert most_sent(Layout(size=size, balanced=balanced), halo) == sent


def test_a_halo_in_words() -> None:
    assert Halo(left=3, right=0, chunk=4).words == "halo of 3 positions before each chunk"
    assert Halo(left=3, right=2, chunk=4).words == "halo of 3 positions before and 2 positions after each chunk"
    assert Halo(left=0, right=0, chunk=4).words == "halo of 0 positions around each chunk"


# ---- on several ranks ----------------------------------------------------------------------------------------------------

_ORDERS = (None, "head_tail")


def _runs(cases: tuple[str, ...], inner: str = "eager") -> list[Run]:
    return [Run(case=case, method="all_gather", load_balance=order, inner=inner) for case in cases for order in _ORDERS]


_TWO = [
    *_runs(("near", "further ahead than back", "near, left padding", "near, sinks", "chunks that a rank has whole")),
    *_runs(("near, ALiBi",), "aot_eager"),
    *_runs(("near",), "inductor"),
    Run(case="window", method="all_gather", load_balance=None),
]
#: which reach beyond the neighbour, too
_FOUR = [
    *_runs(("window", "near on both sides", "near, of one document", "near, 4 heads share 1, values of another width")),
    *_runs(("near, or ahead",)),
    Run(case="window wider than a part", method="all_gather", load_balance=None),
    Run(case="near", method="auto", load_balance="head_tail"),
]
#: what is gathered because that is less
_GATHERED = [
    Run(case="window", method="all_gather", load_balance="head_tail"),
    Run(case="window wider than a part", method="all_gather", load_balance=None),
    Run(case="near", method="all_to_all", load_balance=None),
]


def _check(results: list[Result], word: str) -> None:
    for result in results:
        assert result.error < 1e-12
        assert result.gradient_error < 1e-12
        assert result.sites == 2
        assert all("proved" in mask for mask in result.masks), result.masks
        assert result.notes
        assert any(note.startswith(f"context parallel: {word}") for note in result.notes), result.notes


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    return against_one.results(asked_for(request, "run", [*_TWO, *_GATHERED]), 2)


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    return against_one.results(asked_for(request, "run", _FOUR), 4)


@pytest.mark.parametrize("run", further(_TWO, daily=[*_TWO[0:10:3], *_TWO[10::2], _TWO[-1]]), ids=lambda run: run.name)
def test_two_ranks(two: dict[str, list[Result]], run: Run) -> None:
    _check(two[run.name], "halo of")


@pytest.mark.parametrize("run", _GATHERED, ids=lambda run: run.name)
def test_what_is_too_wide_for_two_ranks_is_gathered(two: dict[str, list[Result]], run: Run) -> None:
    for result in two[run.name]:
        assert any(note.startswith("context parallel: all_") for note in result.notes)
        assert result.error < 1e-12


@pytest.mark.parametrize(
    "run", further(_FOUR, daily=[_FOUR[0], _FOUR[3], _FOUR[5], _FOUR[-1]]), ids=lambda run: run.name
)
def test_four_ranks(four: dict[str, list[Result]], run: Run) -> None:
    _check(four[run.name], "halo of")


def test_bytes_of_a_halo_are_those_of_its_positions(four: dict[str, list[Result]]) -> None:
    """Two rows of 4 heads, k and v of 8 float64 each: 10 positions reach the next rank and the one after it."""
    (note, *_) = four["window · all_gather · contiguous · eager"][0].notes
    sent = 10 * models.BATCH * 4 * 2 * models.HEAD_DIM * torch.float64.itemsize
    order = "over 4 ranks, contiguous positions"
    assert (
        note
        == f"context parallel: halo of 10 positions before each chunk {order}, a rank sends {sent} bytes in the forward"
    )


# The exchange of a halo, with ranks that are simulated in one process.
B, H, D = 2, 3, 2


class _World:
    """Every rank runs twice: first to say what it sends, then to get what the others said."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self.said: list[tuple[torch.Tensor, list[int]]] = []

    def exchanged(self, x: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
        if len(self.said) < self.size:
            self.said.append((x.clone(), sent))
            return x.new_zeros(sum(received))
        parts = [x.split(counts)[self.rank] for x, counts in self.said]
        assert [part.numel() for part in parts] == received
        return torch.cat(parts)

    def run(self, op: Any, given: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        self.said.clear()
        found = []
        for _ in range(2):
            found = []
            for rank in range(self.size):
                self.rank = rank
                found.append(op(given[rank], *args))
        return found


@st.composite
def _drawn(draw: st.DrawFn) -> tuple[Layout, Halo]:
    layout = Layout(size=draw(st.integers(2, 4)), balanced=draw(st.booleans()))
    chunk = draw(st.integers(1, 3))
    widest = min(5, (layout.chunks - 1) * chunk)
    return layout, Halo(left=draw(st.integers(0, widest)), right=draw(st.integers(1, widest)), chunk=chunk)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=_drawn())
def test_halos_hold_what_neighbours_have_and_gradients_go_back(
    monkeypatch: pytest.MonkeyPatch, drawn: tuple[Layout, Halo]
) -> None:
    layout, halo = drawn
    world = _World(layout.size)
    monkeypatch.setattr(torch_halos, "rank_of", lambda group: world.rank)
    monkeypatch.setattr(torch_halos, "sent_and_received", world.exchanged)
    args = (halo.left, halo.right, halo.chunk, layout.size, layout.balanced, "g")
    chunks = torch.randn(layout.chunks, B, H, halo.chunk, D, dtype=torch.float64)
    ends = torch.cat((chunks[..., halo.chunk - halo.tail :, :], chunks[..., : halo.head, :]), 3)
    own = [torch.stack([ends[i] for i in layout.chunks_of(rank)], 2) for rank in range(layout.size)]
    found = world.run(torch_halos._halo, own, *args)
    around = torch.nn.functional.pad(torch.cat(tuple(chunks), 2), (0, 0, halo.left, halo.right))
    for rank in range(layout.size):
        for at, i in enumerate(layout.chunks_of(rank)):
            start = i * halo.chunk
            left = around[:, :, start : start + halo.left]
            right = around[:, :, start + halo.left + halo.chunk :][:, :, : halo.right]
            assert found[rank][:, :, at].equal(torch.cat((left, right), 2))
    grads = [torch.randn_like(x) for x in found]
    back = world.run(torch_halos._halo_gradient, grads, *args)
    there = sum((x * g).sum() for x, g in zip(found, grads, strict=True))
    here = sum((x * g).sum() for x, g in zip(own, back, strict=True))
    torch.testing.assert_close(there, here)


def test_the_op_knows_its_shapes_without_running() -> None:
    ends = torch.empty(B, H, 2, 5, D, device="meta")
    assert torch_halos.halo(ends, 9, 2, 3, 4, True, "g").shape == (B, H, 2, 11, D)
    grad = torch.empty(B, H, 2, 11, D, device="meta")
    assert torch_halos.halo_gradient(grad, 9, 2, 3, 4, True, "g").shape == (B, H, 2, 5, D)
