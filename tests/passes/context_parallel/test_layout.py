"""Where the positions of all ranks stand in the whole sequence, and what the collectives are told."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.passes.context_parallel.layout import GraphLayout
from tests.lowerings.emitting import GraphEmitter

CPU = torch.device("cpu")


def _positions(monkeypatch: pytest.MonkeyPatch, layout: GraphLayout, rank: int, length: int) -> torch.Tensor:
    monkeypatch.setattr(torch_collectives, "rank_of", lambda group: rank)
    builder = GraphEmitter(fx.Graph())
    return builder.value(layout.positions(builder, length, CPU))  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "length"), [(1, 4), (2, 1), (2, 6), (3, 7), (4, 2)])
def test_pieces_follow_each_other(monkeypatch: pytest.MonkeyPatch, size: int, length: int) -> None:
    layout = GraphLayout(size=size, group="g", is_balanced=False)
    found = [_positions(monkeypatch, layout, rank, length) for rank in range(size)]
    assert torch.equal(torch.cat(found), torch.arange(size * length))
    assert {x.dtype for x in found} == {torch.int64}


@pytest.mark.parametrize(("size", "length"), [(1, 4), (2, 2), (2, 6), (4, 8)])
def test_balanced_ranks_have_a_chunk_of_the_front_and_one_of_the_back(
    monkeypatch: pytest.MonkeyPatch, size: int, length: int
) -> None:
    layout, half = GraphLayout(size=size, group="g", is_balanced=True), length // 2
    chunks = torch.arange(size * length).view(2 * size, half)
    for rank in range(size):
        expected = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        assert torch.equal(_positions(monkeypatch, layout, rank, length), expected)


def test_no_graph_holds_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for rank in (0, 1):
        monkeypatch.setattr(torch_collectives, "rank_of", lambda group, rank=rank: rank)
        builder, layout = GraphEmitter(fx.Graph()), GraphLayout(size=2, group="g", is_balanced=True)
        first = layout.positions(builder, 4, CPU)  # type: ignore[arg-type]
        assert layout.positions(builder, 4, CPU) is first  # type: ignore[arg-type]
        builder.graph.output(first)
        texts.append(str(builder.graph))
    assert texts[0] == texts[1]
    assert "sequence_rank" in texts[0]


@pytest.mark.parametrize("is_balanced", [True, False])
def test_collectives_are_told_how_the_sequence_lies(is_balanced: bool) -> None:
    told: list[tuple[object, ...]] = []

    class Told:
        def call(self, function: object, *args: object) -> None:
            told.append((function, *args))

    layout, builder = GraphLayout(size=4, group="g", is_balanced=is_balanced), Told()
    for one in (
        lambda: layout.gathered(builder, "x", 2),
        lambda: layout.to_heads(builder, "x"),
        lambda: layout.to_positions(builder, "x"),
    ):  # type: ignore[arg-type]
        one()
    assert told == [
        (torch_collectives.gathered_sequence, "x", 2, 4, is_balanced, "g"),
        (torch_collectives.heads_for_positions, "x", 4, is_balanced, "g"),
        (torch_collectives.positions_for_heads, "x", 4, is_balanced, "g"),
    ]
