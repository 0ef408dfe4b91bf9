"""Search for the measured rows nearest to a shape, and the limit beyond which a shape is too far from all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar


class HasLength(Protocol):
    """A row with the length that it was measured at."""

    @property
    def seqlen(self) -> int: ...


Row = TypeVar("Row")
OfLength = TypeVar("OfLength", bound=HasLength)

#: largest ratio of the shortest row's length to a shape's, and of a shape's longer length to its shorter one: rows say nothing beyond
_FAR = 2


def is_far(seqlens: tuple[int, int], least: int) -> bool:
    """Return whether rows say nothing of these lengths. seqlens: the smaller and the larger one. least: the shortest row's."""
    shorter, longer = seqlens
    return _FAR * shorter < least or longer > _FAR * shorter


def nearest_rows(
    rows: Iterable[Row], sizes: Callable[[Row], tuple[float, ...]], wanted: tuple[float, ...]
) -> list[Row]:
    """Return all rows that are as near as the nearest one. The first size decides, as a ratio, and then the next one.

    sizes: of a row, as many as `wanted` has.
    """
    near = [(_distance(sizes(row), wanted), row) for row in rows]
    least = min((distance for distance, _ in near), default=None)
    return [row for distance, row in near if distance == least]


def rows_of_nearest_length(
    rows: Sequence[OfLength],
    seqlens: tuple[int, int],
    further: Callable[[OfLength], tuple[float, ...]] = lambda row: (),
    wanted: tuple[float, ...] = (),
) -> list[OfLength] | str:
    """Return the rows of the nearest length, and then of the nearest further sizes; or why no row applies to such lengths.

    rows: at least one. seqlens: the smaller and the larger one.
    """
    least = min(row.seqlen for row in rows)
    if is_far(seqlens, least):
        return f"lengths of {seqlens[0]} and {seqlens[1]}, and the nearest row has S {least}"
    return nearest_rows(rows, lambda row: (row.seqlen, *further(row)), (seqlens[0], *wanted))


def _distance(sizes: tuple[float, ...], wanted: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(abs(math.log(max(a, 1)) - math.log(max(b, 1))) for a, b in zip(sizes, wanted, strict=True))
