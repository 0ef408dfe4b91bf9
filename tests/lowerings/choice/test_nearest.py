"""Which rows are nearest to a shape."""

from __future__ import annotations

import pytest

from attn_compiler.lowerings.choice import nearest

ROWS = [("a", 1024, 4), ("b", 4096, 4), ("c", 4096, 64), ("d", 4096, 64)]


def _names(*wanted: float) -> list[str]:
    return [name for name, *_ in nearest.of(ROWS, lambda row: (row[1], row[2])[: len(wanted)], wanted)]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ((4096,), ["b", "c", "d"]),
        ((2000,), ["a"]),
        ((2100,), ["b", "c", "d"]),
        ((9999, 5), ["b"]),
        ((4096, 60), ["c", "d"]),
        ((1100, 64), ["a"]),
        ((0, 0), ["a"]),
    ],
)
def test_the_first_size_decides_as_a_ratio_and_then_the_next(wanted: tuple[float, ...], names: list[str]) -> None:
    assert _names(*wanted) == names


def test_none_of_none() -> None:
    assert nearest.of([], lambda row: (1,), (1,)) == []


@pytest.mark.parametrize(
    ("seqlens", "far"), [((512, 512), False), ((511, 511), True), ((512, 1024), False), ((512, 1025), True)]
)
def test_half_the_shortest_and_twice_the_keys_are_the_ends(seqlens: tuple[int, int], far: bool) -> None:
    assert nearest.is_far(seqlens, 1024) is far
