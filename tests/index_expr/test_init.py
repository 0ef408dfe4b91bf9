"""The normal forms that the package shows are those that its functions give."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load

_SHOWN = re.compile(r"^    (\S.*?) {2,}(Test\(.*\))$", re.MULTILINE)


class _Written:
    """An expression that Python's operators build."""

    def __init__(self, x: Expr) -> None:
        self.x = x

    def _with(self, other: object, make: Callable[[Expr, Expr], Expr]) -> _Written:
        return _Written(make(self.x, other.x if isinstance(other, _Written) else Const(other)))  # type: ignore[arg-type]

    def __sub__(self, other: object) -> _Written:
        return self._with(other, lambda a, b: ix.add(a, b, -1))

    def __mod__(self, other: object) -> _Written:
        return self._with(other, lambda a, b: ix.apply("mod", a, b))

    def __floordiv__(self, other: object) -> _Written:
        return self._with(other, lambda a, b: ix.apply("floordiv", a, b))

    def __le__(self, other: object) -> _Written:
        return self._with(other, lambda a, b: ix.compare("<=", a, b))

    def __lt__(self, other: object) -> _Written:
        return self._with(other, lambda a, b: ix.compare("<", a, b))

    def __eq__(self, other: object) -> _Written:  # type: ignore[override]
        return self._with(other, lambda a, b: ix.compare("==", a, b))

    __hash__ = None  # type: ignore[assignment]


class _Ids:
    def __getitem__(self, at: tuple[_Written, ...]) -> _Written:
        return _Written(Load("ids", tuple(one.x for one in at), "int"))


def _shown(x: Expr) -> str:
    """An expression as the table writes it."""
    match x:
        case ix.Test(relation=relation, form=form):
            return f'Test("{relation}", {_shown(form)})'
        case Linear():
            terms = [("-" if factor < 0 else "+", _shown(term)) for term, factor in _added_first(x)]
            words = " ".join(f"{sign} {term}" for sign, term in terms).removeprefix("+ ")
            return words + (f" + {x.const}" if x.const else "")
        case Apply(op=op, args=args):
            return f'Apply("{op}", {", ".join(map(_shown, args))})'
        case Load(tensor=tensor, at=at):
            return f'Load("{tensor}", {", ".join(map(_shown, at))})'
        case Index(name=name):
            return name
        case Const(value=value):
            return str(value)
    raise TypeError(x)


def _added_first(x: Linear) -> list[tuple[Any, int]]:
    """What is added comes first."""
    return sorted(x.terms, key=lambda term: term[1] < 0)


def test_the_forms_that_are_shown_are_those_that_are_made() -> None:
    shown = _SHOWN.findall(ix.__doc__ or "")
    assert len(shown) == 5
    names: dict[str, Any] = {name: _Written(Index(name)) for name in "bhqk"} | {"ids": _Ids()}
    made = {words: eval(words, {}, names).x for words, _ in shown}
    assert {words: _shown(x) for words, x in made.items()} == dict(shown)
