"""What an expression means, and in which normal form."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import OPS, Apply, Const, Expr, Index, Linear, Load, Size
from attn_compiler.index_expr.linear_forms import combine, linear, plain
from attn_compiler.index_expr.looking import parts
from tests.index_expr.expressions import Tree, bools, element, floats, ints, points

# Texts for people.
B, H, Q, K = map(Index, "bhqk")
PADDING, FLAG, X = Load("mask", (B, K), "int"), Load("flag", (B, Q), "bool"), Load("x", (K,), "float")
CAUSAL = ix.compare("<=", K, Q)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (CAUSAL, "k <= q"),
        (ix.apply("and", CAUSAL, ix.as_bool(PADDING)), "mask[b, k] ≠ 0 ∧ k <= q"),
        (ix.apply("or", CAUSAL, ix.apply("and", FLAG, ix.as_bool(PADDING))), "((flag[b, q] ∧ mask[b, k] ≠ 0) ∨ k <= q)"),
        (ix.invert(FLAG), "¬flag[b, q]"),
        (ix.add(Q, K, -1), "q - k"),
        (ix.add(ix.mul(K, Const(-2)), Const(-3)), "-2·k - 3"),
        (ix.add(Const(3), K, -1), "3 - k"),
        (ix.apply("floordiv", ix.add(Q, Const(1)), Const(2)), "((q + 1) // 2)"),
        (ix.apply("abs", ix.add(Q, K, -1)), "|q - k|"),
        (ix.compare("<=", ix.apply("abs", ix.add(Q, K, -1)), Const(3)), "|q - k| <= 3"),
        (ix.compare("<", K, Const(-2)), "k <= -3"),
        (ix.compare("<", K, Size("4*s0")), "k + 1 <= (4*s0)"),
        (ix.where(CAUSAL, Const(0.0), Const(-1e9)), "(k <= q ? 0 : -1e+09)"),
        (ix.compare("<", X, Const(-0.5)), "(x[k] < -0.5)"),
        (ix.apply("xor", CAUSAL, FLAG), "((k <= q) ⊕ flag[b, q])"),
        (Load("past", (), "int"), "past"),
        (ix.TRUE, "true"),
        (Load("x", (ix.add(K, Const(1)),), "float"), "x[k + 1]"),
    ],
)  # fmt: skip
def test_texts(x: Expr, text: str) -> None:
    assert ix.text(x) == text


def test_loads_are_looked_up_at_the_indices_values() -> None:
    seen = []

    def load(tensor: str, at: tuple[int, ...]) -> int:
        seen.append((tensor, at))
        return 5

    assert ix.evaluate(ix.add(Load("x", (B, ix.add(K, Const(2))), "int"), K), {"b": 1, "k": 3}, load) == 8
    assert seen == [("x", (1, 5))]


def test_a_branch_that_is_not_taken_is_not_looked_at() -> None:
    x = ix.where(ix.compare("==", Q, ix.ZERO), Const(7), Load("x", (ix.add(Q, Const(-1)),), "int"))

    def load(tensor: str, at: tuple[int, ...]) -> int:
        raise IndexError(at)

    assert ix.evaluate(x, {"q": 0}, load) == 7


# ---- texts, read again --------------------------------------------------------------------------------------------

_TOKENS = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?|\w+|<=|//|[^\s\w]")

#: two-sided operators of each level, from the loosest
_LEVELS: list[dict[str, Callable[[Any, Any], Any]]] = [
    {"∨": lambda a, b: bool(a or b)},
    {"∧": lambda a, b: bool(a and b)},
    {"<=": operator.le, "=": operator.eq, "≠": operator.ne, "<": operator.lt, "⊕": lambda a, b: bool(a) != bool(b)},
    {"+": operator.add, "-": operator.sub},
    {"·": operator.mul, "//": operator.floordiv, "%": operator.mod, "/": OPS["div"][0]},
]


class _Read:
    """Evaluates a text by the usual precedences; brackets and calls as everywhere. Strict: both sides of everything are computed."""

    def __init__(self, text: str, point: dict[str, int]) -> None:
        self.tokens, self.point = [*_TOKENS.findall(text), ""], point

    def whole(self) -> Any:
        value = self.level(0)
        assert self.tokens == [""], self.tokens
        return value

    def take(self, *expected: str) -> str:
        token = self.tokens.pop(0)
        assert not expected or token in expected, (token, self.tokens)
        return token

    def level(self, number: int) -> Any:
        if number == len(_LEVELS):
            return self.whole_part()
        value = self.level(number + 1)
        while self.tokens[0] in _LEVELS[number]:
            value = _LEVELS[number][self.take()](value, self.level(number + 1))
        return value

    def whole_part(self) -> Any:
        token = self.take()
        match token:
            case "(":
                return self.bracket()
            case "|":
                value = abs(self.level(0))
                self.take("|")
                return value
            case "¬":
                return not self.whole_part()
            case "-":
                # Binds like a factor: -2·k is (-2)·k.
                return -self.whole_part()
            case "true" | "false":
                return token == "true"
            case "inf" | "nan":
                return float(token)
            case "min" | "max" | "float" | "int" if self.tokens[0] == "(":
                return OPS[token][0](*self.listed("(", ")"))
            case "bool" | "int" | "float" if self.tokens[0] == "[":
                return element(token, tuple(map(int, self.listed("[", "]"))))
            case _ if token in self.point:
                return self.point[token]
            case _:
                return float(token) if "." in token or "e" in token else int(token)

    def bracket(self) -> Any:
        value = self.level(0)
        if self.take(")", "?") == "?":
            yes = self.level(0)
            self.take(":")
            no = self.level(0)
            self.take(")")
            return yes if value else no
        return value

    def listed(self, opening: str, closing: str) -> list[Any]:
        self.take(opening)
        values = [self.level(0)]
        while self.take(",", closing) == ",":
            values.append(self.level(0))
        return values


def _prints_its_numbers(x: Expr) -> bool:
    """Whether no number in x has more digits than a text for people shows."""
    if isinstance(x, Const) and isinstance(x.value, float):
        return float(f"{x.value:g}") == x.value or x.value != x.value
    return all(map(_prints_its_numbers, parts(x)))


@settings(max_examples=400, deadline=None)
@given(st.one_of(bools(), ints(), floats(2)), points())
def test_a_text_can_be_read_in_one_way_only(tree: Tree, point: dict[str, int]) -> None:
    x = tree.build()
    assume(_prints_its_numbers(x))
    try:
        wanted = ix.evaluate(x, point, element)
        found = _Read(ix.text(x), point).whole()
    except (ValueError, OverflowError):
        # No whole number, in a branch that is not taken perhaps.
        assume(False)
    assert found == wanted or (found != found and wanted != wanted), ix.text(x)


@given(st.one_of(bools(2), ints(2), floats(2)))
def test_equal_expressions_have_equal_texts_and_one_line(tree: Tree) -> None:
    text = ix.text(tree.build())
    assert text == ix.text(tree.build())
    assert "\n" not in text
    assert "Const(" not in text


def test_text_that_is_cut_off() -> None:
    x = ix.compare("<=", Index("k"), Index("q"))
    assert ix.text(x, 6) == ix.text(x) == "k <= q"
    assert ix.text(x, 4) == "k <=…"
    assert ix.shortened("words", 5) == "words"


# The normal forms that the package shows are those that its functions give.
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


def test_numbers_and_other_expressions_as_forms() -> None:
    assert linear(Const(3)) == Linear((), 3)
    assert linear(Const(True)) == Linear((), 1)
    assert linear(Q) == Linear(((Q, 1),))
    form = combine(linear(Q), linear(K), 2)
    assert linear(form) is form


@pytest.mark.parametrize("factor", [1, -2, 7])
def test_the_order_of_building_does_not_show(factor: int) -> None:
    one = combine(combine(linear(Q), linear(K), factor), linear(Const(5)), 1)
    other = combine(combine(linear(Const(5)), linear(K), factor), linear(Q), 1)
    assert one == other
    assert dict(one.terms) == {Q: 1, K: factor}
    assert one.const == 5


def test_what_cancels_out_is_gone() -> None:
    difference = combine(linear(Q), linear(K), -1)
    assert combine(difference, difference, -1) == Linear(())
    assert combine(difference, linear(K), 1) == linear(Q)
    assert combine(difference, linear(K), 0) is difference


def test_forms_are_wrapped_only_where_needed() -> None:
    assert plain(Linear((), 4)) == Const(4)
    assert plain(linear(Q)) is Q
    doubled, shifted = Linear(((Q, 2),)), Linear(((Q, 1),), 1)
    assert plain(doubled) is doubled
    assert plain(shifted) is shifted
