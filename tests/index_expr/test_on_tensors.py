"""Expressions on index tensors against the same expressions on numbers, element by element."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Size, Test
from attn_compiler.index_expr.on_tensors import ON_TENSORS, evaluate_on
from tests.index_expr.tensor_expressions import SIZES, SYMBOLS, TENSORS, bools, floats, ints

# ---- the two evaluations ------------------------------------------------------------------------------------------


def _element(name: str, at: tuple[int, ...]) -> Any:
    return TENSORS[name][at].item()


def _one_by_one(x: Expr) -> list[Any]:
    places = itertools.product(*(range(size) for size in SIZES.values()))
    return [ix.evaluate(x, {**SYMBOLS, **dict(zip(SIZES, place, strict=True))}, _element) for place in places]


def _at_once(x: Expr) -> list[Any]:
    grids = torch.meshgrid(*(torch.arange(size) for size in SIZES.values()), indexing="ij")
    values = {**SYMBOLS, **dict(zip(SIZES, grids, strict=True))}
    return evaluate_on(x, values, TENSORS).expand(*SIZES.values()).flatten().tolist()


def _same(a: Any, b: Any) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@given(st.one_of(ints, bools, floats))
def test_equals_evaluate_at_every_index(x: Expr) -> None:
    assert all(map(_same, _at_once(x), _one_by_one(x))), ix.text(x)


#: whole numbers of both signs, other numbers, and truth values, all different at different indices
_WHOLE = (Linear(((Index("k"), 1),), -2), Linear(((Index("q"), 2),), -3))
_REAL = (Load("slopes", (Index("k"),), "float"), Apply("div", (_WHOLE[1], Const(4))))
_TRUTH = (Load("flags", (Index("b"), Index("k")), "bool"), Test(">=", Linear(((Index("q"), 1),), -1)))
_OPERANDS: dict[str, list[tuple[Expr, ...]]] = {
    **{op: [_TRUTH] for op in ("and", "or", "xor")},
    "not": [_TRUTH[:1], _WHOLE[:1]],
    "where": [(_TRUTH[0], *_WHOLE), (_TRUTH[0], *_REAL), (_TRUTH[1], _WHOLE[0], _REAL[0]), (_WHOLE[0], *_TRUTH)],
    **{op: [(_WHOLE[0], Const(3)), (_WHOLE[0], Const(-2)), _WHOLE] for op in ("floordiv", "mod", "div")},
    **{op: [_WHOLE, _REAL, _TRUTH, (_WHOLE[0], _REAL[0]), (_WHOLE[0], _TRUTH[1])] for op in ("mul", "add")},
    **{op: [_WHOLE, _REAL, (_WHOLE[0], _REAL[0])] for op in ("min", "max", "eq", "lt")},
    **{op: [_WHOLE[:1], _REAL[:1]] for op in ("abs", "float", "int", "rounded")},
    **{op: [(Apply("abs", (Apply("add", (_REAL[0], Const(0.125))),)),)] for op in ("log", "exp")},
}


@pytest.mark.parametrize("op", [op for op in ix.OPS if op in _OPERANDS])
def test_each_op(op: str) -> None:
    for args in _OPERANDS[op]:
        x = Apply(op, args)
        assert _at_once(x) == pytest.approx(_one_by_one(x)), ix.text(x)


def test_every_op_has_a_meaning() -> None:
    assert {*ON_TENSORS, "where", "and", "or"} == set(ix.OPS)


def test_unknown_op_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'cosine'"):
        _at_once(Apply("cosine", (Index("q"),)))


# ---- what only counts in the branch that is taken -----------------------------------------------------------------

_BEYOND = Load("lengths", (Index("k"),), "int")


def test_reading_beyond_a_tensor_is_an_error() -> None:
    with pytest.raises(IndexError, match="lengths has size 3 in dimension 0"):
        _at_once(_BEYOND)


def test_reading_beyond_a_tensor_in_the_branch_not_taken_is_none() -> None:
    x = Apply("where", (ix.compare("<", Index("k"), Const(3)), _BEYOND, Const(7)))
    assert _at_once(x) == _one_by_one(x)


def test_an_index_below_zero_counts_from_the_end() -> None:
    x = Load("slopes", (Linear(((Index("k"), 1),), -4),), "float")
    assert _at_once(x) == _one_by_one(x)


def test_dividing_by_zero_in_the_branch_not_taken_is_none() -> None:
    quotient = Apply("floordiv", (Const(6), Index("q")))
    x = Apply("where", (ix.compare(">", Index("q"), ix.ZERO), quotient, ix.ZERO))
    assert _at_once(x) == _one_by_one(x)
    with pytest.raises(ZeroDivisionError):
        _at_once(quotient)


def test_missing_names() -> None:
    with pytest.raises(KeyError, match="s9"):
        _at_once(Size("s9"))
    with pytest.raises(KeyError, match="nothing"):
        _at_once(Load("nothing", (), "int"))


def test_index_tensors_may_broadcast_and_loads_of_any_dtype_are_exact() -> None:
    values = {"q": torch.arange(3)[:, None], "k": torch.arange(4)}
    tensors = {"x": torch.tensor([1.5, 2.0, -3.0, 0.1], dtype=torch.bfloat16)}
    got = evaluate_on(Apply("add", (Load("x", (Index("k"),), "float"), Index("q"))), values, tensors)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, tensors["x"].double() + torch.arange(3)[:, None], rtol=0, atol=0)


@pytest.mark.parametrize("nudge", [1e-6, -1e-6])
def test_a_nudge_moves_what_is_cut_off_at_a_boundary(nudge: float) -> None:
    """log(8) / log(2) is 3 up to rounding."""
    whole = ix.apply("int", ix.apply("div", ix.apply("log", ix.as_float(Index("k"))), Const(math.log(2.0))))
    at = {"k": torch.tensor([8, 9, 15])}
    cut = evaluate_on(whole, at, {}, nudge=nudge).tolist()
    assert cut == [3 if nudge > 0 else 2, 3, 3]


@pytest.mark.parametrize("op", ["and", "or"])
def test_reading_beyond_a_tensor_beside_what_decides_is_none(op: str) -> None:
    """A padding mask that is shorter than the keys."""
    k, tensors = Index("k"), {"m": torch.tensor([True, False])}
    beyond = ix.compare(">=", k, Const(2))
    condition = ix.apply(op, beyond if op == "or" else ix.invert(beyond), Load("m", (k,), "bool"))
    wanted = [True, False, op == "or", op == "or"]
    assert evaluate_on(condition, {"k": torch.arange(4)}, tensors).tolist() == wanted
    assert [ix.evaluate(condition, {"k": i}, lambda _, at: tensors["m"][at].item()) for i in range(4)] == wanted
    unguarded = ix.apply(op, Load("m", (k,), "bool"), ix.compare("==", k, Const(3)))
    with pytest.raises(IndexError):
        evaluate_on(unguarded, {"k": torch.arange(4)}, tensors)
