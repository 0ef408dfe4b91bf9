"""Frozen data as text and back."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.spec.codec import UNSAID, Codec


class Side(enum.Enum):
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    weight: float | None = 1.0
    flag: bool = False


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    others: tuple[Inner, ...] = ()
    side: Side = Side.LEFT
    where: ix.Expr = ix.TRUE


CLASSES = (Outer, Inner, Side)
WHERE = ix.compare("<=", ix.Index("k"), ix.add(ix.Index("q"), ix.Const(3)))
VALUES = [
    Outer(inner=Inner(size=1)),
    Outer(inner=Inner(size=2, weight=None), others=(Inner(size=3, weight=0.0), Inner(size=4, flag=True)), where=WHERE),
]


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("value", VALUES)
def test_text_and_back(value: Outer, brief: bool) -> None:
    codec = Codec(CLASSES, brief=brief)
    assert codec.value(codec.text(value), Outer) == value
    assert codec.value(codec.text(value), Outer) is codec.value(codec.text(value), Outer)


def test_a_brief_text_says_what_is_not_usual() -> None:
    codec = Codec(CLASSES, brief=True)
    assert codec.text(Inner(size=1)) == '{"kind":"Inner","size":1}'
    assert codec.text(Inner(size=1, weight=None)) == '{"kind":"Inner","size":1,"weight":null}'
    # Equal in Python, and another text.
    assert codec.text(Inner(size=1, flag=0)) != codec.text(Inner(size=1))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Grown:
    size: int
    later: str = field(default="usual", metadata=UNSAID)


def test_a_field_that_came_later_is_said_where_it_is_not_usual() -> None:
    codec = Codec((Grown,))
    assert codec.text(Grown(size=1)) == '{"kind":"Grown","size":1}'
    assert codec.text(Grown(size=1, later="not")) == '{"kind":"Grown","later":"not","size":1}'
    assert all(codec.value(codec.text(x), Grown) == x for x in (Grown(size=1), Grown(size=1, later="not")))


def test_a_full_text_says_everything() -> None:
    said = json.loads(Codec(CLASSES).text(VALUES[0]))
    assert said["inner"] == {"kind": "Inner", "size": 1, "weight": 1.0, "flag": False}
    assert said["side"] == {"kind": "Side", "value": "left"}


def test_further_classes() -> None:
    with pytest.raises(ValueError, match="unknown kind, 'Inner'; known are Side"):
        Codec((Side,)).value('{"kind":"Inner","size":1}', Inner)
    assert Codec((Side,)).extended(Inner).value('{"kind":"Inner","size":1}', Inner) == Inner(size=1)


def test_a_text_of_another_class_is_refused() -> None:
    codec = Codec(CLASSES)
    with pytest.raises(TypeError, match="the text of Outer, got that of Inner"):
        codec.value(codec.text(Inner(size=1)), Outer)


def test_two_classes_of_one_name_are_refused() -> None:
    other = dataclass(frozen=True)(type("Inner", (), {}))
    with pytest.raises(ValueError, match="one name"):
        Codec((Inner, other))
