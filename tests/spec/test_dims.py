from __future__ import annotations

import dataclasses

import pytest

from attn_compiler.spec import dims
from attn_compiler.spec.attention import Dim, SizeRange
from tests.lowerings.specs import make_spec


@pytest.mark.parametrize(
    ("dim", "bound"),
    [
        (0, 0),
        (7, 7),
        ("s0", 2),
        ("s77", 2),
        ("u0", 0),
        ("s0 + s1", 4),
        ("s0 + 1", 3),
        ("u0 + 1", 1),
        ("s0 - 1", 1),
        ("s0 - 3", 0),
        ("2*s0", 4),
        ("3*s0 + 3*s1", 12),
        ("(s0//2)", 1),
        ("(s0//4)", 0),
        ("(((s0 - 1)//2)) + 1", 1),
        ("-s0 + s1", 0),
        ("-s0 + s1 + 1", 0),
        ("s0 - s1", 0),
        ("Mod(s0, 8)", 0),
        ("s0**2", 0),
    ],
)
def test_at_least(dim: Dim, bound: int) -> None:
    assert dims.at_least(dim) == bound


def test_equal_names_are_equal_sizes_and_nothing_else_is() -> None:
    assert dims.same("s0", "s0")
    assert dims.same(4, 4)
    assert not dims.same("s0", "s1")
    assert not dims.same("s0", 4)


@pytest.mark.parametrize(
    ("dim", "of", "known"),
    [
        (64, 8, True),
        (0, 8, True),
        (36, 8, False),
        ("64*s0", 8, True),
        ("64*s0", 128, False),
        ("8*s0*s1", 8, True),
        ("4*s0*s1", 8, False),
        ("64*s0 + 128", 8, True),
        ("64*s0 + 4", 8, False),
        ("64*s0 - 64", 64, True),
        ("-64*s0 + 64*s1", 8, True),
        ("s0", 1, True),
        ("s0", 2, False),
        ("8*(s0//8)", 8, True),
        ("Max(8, 64*s0)", 8, False),
    ],
)
def test_is_multiple(dim: Dim, of: int, known: bool) -> None:
    assert dims.is_multiple(dim, of) == known


def test_a_symbol_can_have_every_remainder() -> None:
    assert dims.can_have_remainder(192, modulus=128, remainder=64)
    assert not dims.can_have_remainder(128, modulus=128, remainder=64)
    assert dims.can_have_remainder("s0", modulus=128, remainder=64)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((2, 1, "s0", 7), True),
        (("s0", 7), True),
        ((1,), True),
        ((), True),
        ((4, "s0", 7), True),
        ((3, 1, "s0", 7), False),
        ((2, 1, "s1", 7), False),
        ((1, 2, 1, "s0", 7), False),
    ],
)
def test_broadcasts(shape: tuple[Dim, ...], fits: bool) -> None:
    assert dims.broadcasts(shape, (2, 4, "s0", 7)) == fits


@pytest.mark.parametrize(
    ("dim", "found"),
    [
        (7, (7, 7)),
        ("s0", (2, None)),
        ("s1", (2, 512)),
        ("8*s2", (16, None)),
        ("s3", (1024, None)),
        ("u0", (0, 64)),
    ],
)
def test_the_range_of_a_size_of_a_spec(dim: Dim, found: tuple[int, int | None]) -> None:
    ranges = (
        SizeRange(size="s1", least=0, most=512),
        SizeRange(size="s3", least=1024),
        SizeRange(size="u0", least=0, most=64),
    )
    assert dims.range_of(dataclasses.replace(make_spec(), ranges=ranges), dim) == found
