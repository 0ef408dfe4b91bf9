"""What chunks of a sequence need of their neighbours: a halo of so many positions before and after each. Numbers in, numbers out.

A mask that lets a query see the keys near it alone needs no others: those of the chunk, and of its halo.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from attn_compiler.context_parallel.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Halo:
    """left, right: how many positions before and after each chunk belong to its halo. chunk: positions of a chunk."""

    left: int
    right: int
    chunk: int

    @property
    def tail(self) -> int:
        """How many positions at the end of a chunk others may need."""
        return min(self.left, self.chunk)

    @property
    def head(self) -> int:
        """How many at its beginning."""
        return min(self.right, self.chunk)

    @property
    def keys(self) -> int:
        """How many keys the queries of a chunk meet."""
        return self.left + self.chunk + self.right

    @property
    def words(self) -> str:
        """For reports."""
        sides = [f"{n} positions {side}" for n, side in ((self.left, "before"), (self.right, "after")) if n]
        return f"halo of {' and '.join(sides) or '0 positions around'} each chunk"


@dataclass(frozen=True, kw_only=True, slots=True)
class HaloPiece:
    """Positions that one rank sends to another, or to itself.

    source, target: a chunk of the sender and one of the receiver, by their places among those that the rank has. start: of the first
    position among the ends of the source, its tail first, then its head. into: its place in the halo of the target, left before right.
    count: of positions.
    """

    source: int
    target: int
    start: int
    into: int
    count: int


def pieces(layout: Layout, halo: Halo, sender: int, receiver: int) -> tuple[HaloPiece, ...]:
    """What a rank sends to another, in the order in which it is sent."""
    found = [
        piece
        for source, of_sender in enumerate(layout.chunks_of(sender))
        for target, of_receiver in enumerate(layout.chunks_of(receiver))
        for piece in _between(halo, of_sender - of_receiver, source, target)
    ]
    return tuple(found)


def _between(halo: Halo, apart: int, source: int, target: int) -> Iterator[HaloPiece]:
    """What a chunk has of the halo of another one. apart: how many chunks later it comes in the sequence."""
    if apart < 0:
        # The end of a chunk, so far before the other that these positions lie between.
        between = (-apart - 1) * halo.chunk
        count = min(halo.chunk, halo.left - between)
        if count > 0:
            into = halo.left - between - count
            yield HaloPiece(source=source, target=target, start=halo.tail - count, into=into, count=count)
    if apart > 0:
        between = (apart - 1) * halo.chunk
        count = min(halo.chunk, halo.right - between)
        if count > 0:
            yield HaloPiece(source=source, target=target, start=halo.tail, into=halo.left + between, count=count)


@functools.lru_cache(maxsize=64)
def of_rank(
    layout: Layout, halo: Halo, rank: int
) -> tuple[tuple[tuple[HaloPiece, ...], ...], tuple[tuple[HaloPiece, ...], ...]]:
    """What a rank sends to each, and what comes to it from each."""
    ranks = range(layout.size)
    sent = tuple(pieces(layout, halo, rank, other) for other in ranks)
    return sent, tuple(pieces(layout, halo, other, rank) for other in ranks)


@functools.lru_cache(maxsize=64)
def most_sent(layout: Layout, halo: Halo) -> int:
    """The most positions that a rank sends to others."""
    return max(
        sum(piece.count for to in range(layout.size) if to != rank for piece in pieces(layout, halo, rank, to))
        for rank in range(layout.size)
    )
