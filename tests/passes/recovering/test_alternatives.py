"""Alternatives keep their meaning in fewer words: every pair of both is compared."""

from __future__ import annotations

import itertools
import random

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Linear, Load
from attn_compiler.passes.recovering import alternatives

B, Q, K = map(Index, "bqk")
N = 7
WITHIN = {"q": Linear((), N - 1), "k": Linear((), N - 1)}
#: truth values of keys
KEPT = ix.as_bool(Load("kept", (K,), "int"))
#: numbers of documents, of one tensor and of two
SAME, OTHERS = (ix.compare("==", Load("own", (Q,), "int"), Load(name, (K,), "int")) for name in ("own", "other"))


def _le(a: Expr, b: Expr | int) -> Expr:
    return ix.compare("<=", a, Const(b) if isinstance(b, int) else b)


def _holds(x: Expr, q: int, k: int) -> bool:
    return bool(ix.evaluate(x, {"q": q, "k": k}, lambda name, at: at[0] // 3 if name == "own" else int(at[0] % 3 == 0)))


def _assert_same(before: Expr, after: Expr) -> None:
    for q, k in itertools.product(range(N), range(N)):
        assert _holds(before, q, k) == _holds(after, q, k), (q, k)


def _either(*parts: Expr) -> Expr:
    return ix.apply("or", *parts)


def _both(*parts: Expr) -> Expr:
    return ix.apply("and", *parts)


FEWER: dict[str, tuple[Expr, Expr]] = {
    "a prefix that causal holds": (_either(_le(K, ix.add(Q, Const(3))), _le(K, 2)), _le(K, ix.add(Q, Const(3)))),
    "an alternative that another holds": (
        _either(_both(KEPT, _le(K, 2)), _le(K, ix.add(Q, Const(3)))),
        _le(K, ix.add(Q, Const(3))),
    ),
    "what each alternative has": (
        _either(_both(KEPT, _le(K, ix.add(Q, Const(3)))), _le(K, 2)),
        _both(_le(K, ix.add(Q, Const(3))), _either(KEPT, _le(K, 2))),
    ),
    "a part that follows": (_both(_le(K, 2), _le(K, ix.add(Q, Const(3))), KEPT), _both(_le(K, 2), KEPT)),
    "a diagonal within documents": (
        _either(_both(SAME, KEPT), ix.compare("==", K, Q)),
        _both(SAME, _either(KEPT, ix.compare("==", K, Q))),
    ),
    "a diagonal beside another's documents": (
        _either(_both(OTHERS, KEPT), ix.compare("==", K, Q)),
        _either(_both(OTHERS, KEPT), ix.compare("==", K, Q)),
    ),
    "what differs from a value": (_either(ix.compare("!=", K, ix.add(Q, Const(9))), _le(K, 2)), ix.TRUE),
}


@pytest.mark.parametrize("name", FEWER)
def test_what_follows_is_dropped(name: str) -> None:
    before, wanted = FEWER[name]
    found = alternatives.fewer(ix.decide(before, WITHIN), WITHIN)
    assert found == wanted
    _assert_same(before, found)


@pytest.mark.parametrize("seed", range(60))
def test_any_alternatives_keep_their_meaning(seed: int) -> None:
    draw = random.Random(seed)

    def bound() -> Expr:
        form = ix.add(ix.mul(Q, Const(draw.choice((-1, 0, 1)))), ix.mul(K, Const(draw.choice((-1, 1)))))
        return ix.compare(draw.choice(("<=", ">=", "==", "!=")), form, Const(draw.randint(-4, 7)))

    def part() -> Expr:
        return _both(
            *(draw.choice((KEPT, SAME)) if draw.random() < 0.2 else bound() for _ in range(draw.randint(1, 3)))
        )

    before = ix.decide(_both(*(_either(*(part() for _ in range(draw.randint(1, 5)))) for _ in range(2))), WITHIN)
    _assert_same(before, alternatives.fewer(before, WITHIN))


def _rows(*keys: tuple[int, int]) -> Expr:
    """Row by row: the keys from one up to another."""
    return _either(
        *(_both(ix.compare("==", Q, Const(q)), _le(Const(a), K), _le(K, b - 1)) for q, (a, b) in enumerate(keys))
    )


DRAWN: dict[str, tuple[Expr, str]] = {
    "causal": (_rows(*((0, q + 1) for q in range(N))), "k <= q"),
    "a window": (_rows(*((max(q - 2, 0), q + 1) for q in range(N))), "k <= q ∧ q <= k + 2"),
    "frames": (_rows(*((0, min(q // 3 * 3 + 3, N)) for q in range(N))), "k <= 3·(q // 3) + 2"),
    "one length": (_rows(*((0, 4) for _ in range(N))), "k <= 3"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_rows_of_a_loop_are_what_they_draw(name: str) -> None:
    before, words = DRAWN[name]
    found = alternatives.fewer(ix.decide(before, WITHIN), WITHIN)
    assert ix.text(found) == words
    _assert_same(before, found)


@pytest.mark.parametrize("row", range(N))
def test_one_row_that_is_another_draws_nothing_else(row: int) -> None:
    before = _rows(*((0, q + 1 if q != row else q + 2 - 2 * (q == N - 1)) for q in range(N)))
    _assert_same(before, alternatives.fewer(before, WITHIN))


def test_more_alternatives_than_can_be_written_are_given_up() -> None:
    length = 200
    rows = [_both(ix.compare("==", Q, Const(q)), _le(K, q * q % 61)) for q in range(length)]
    within = {name: Linear((), length - 1) for name in "qk"}
    found = alternatives.fewer(_either(*rows), within)
    assert "are the most" in str(alternatives.too_many(found))
    assert alternatives.too_many(_both(_either(*rows[:50]), _le(K, Q))) is None
