"""The halo of a chunk of a sequence: the positions before and after it that its queries see. Numbers in, numbers out.

Under a mask that lets a query see only near keys, a chunk needs the keys of the chunk and of its halo.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from attn_compiler.context_parallel.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Halo:
    """A halo. left, right: positions before and after each chunk. chunk: positions of a chunk."""

    left: int
    right: int
    chunk: int

    @property
    def tail(self) -> int:
        """The number of positions at the end of a chunk that others may need."""
        return min(self.left, self.chunk)

    @property
    def head(self) -> int:
        """The number of positions at the beginning of a chunk that others may need."""
        return min(self.right, self.chunk)

    @property
    def keys(self) -> int:
        """The number of keys that the queries of a chunk meet."""
        return self.left + self.chunk + self.right

    @property
    def words(self) -> str:
        """The text for reports."""
        sides = [f"{n} positions {side}" for n, side in ((self.left, "before"), (self.right, "after")) if n]
        return f"halo of {' and '.join(sides) or '0 positions around'} each chunk"


@dataclass(frozen=True, kw_only=True, slots=True)
class HaloPiece:
    """Positions that one rank sends to another, or to itself.

    source, target: a chunk of the sender and one of the receiver, by index among the rank's chunks. start: of the first position among the
    ends of the source, its tail first, then its head. into: its place in the halo of the target, left before right. count: of positions.
    """

    source: int
    target: int
    start: int
    into: int
    count: int


def pieces(layout: Layout, halo: Halo, sender: int, receiver: int) -> tuple[HaloPiece, ...]:
    """Return the pieces that a rank sends to another, in the order in which they are sent."""
    found = [
        piece
        for source, of_sender in enumerate(layout.chunks_of(sender))
        for target, of_receiver in enumerate(layout.chunks_of(receiver))
        for piece in _between(halo, of_sender - of_receiver, source, target)
    ]
    return tuple(found)


def _between(halo: Halo, apart: int, source: int, target: int) -> Iterator[HaloPiece]:
    """Yield a chunk's positions in the halo of another one. apart: how many chunks later the chunk comes in the sequence."""
    if apart < 0:
        # The end of a chunk. between: the positions between the two chunks.
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
    """Return the pieces that a rank sends to each rank, and those that come to it from each."""
    ranks = range(layout.size)
    sent = tuple(pieces(layout, halo, rank, other) for other in ranks)
    return sent, tuple(pieces(layout, halo, other, rank) for other in ranks)


@functools.lru_cache(maxsize=64)
def most_sent(layout: Layout, halo: Halo) -> int:
    """Return the most positions that a rank sends to others."""
    return max(
        sum(piece.count for to in range(layout.size) if to != rank for piece in pieces(layout, halo, rank, to))
        for rank in range(layout.size)
    )
