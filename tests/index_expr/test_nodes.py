"""Expressions are nodes: how they are made, compared, folded, divided, and changed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import OPS, Apply, Const, Expr, Index, Linear, Load, Size
from attn_compiler.index_expr.changing import rename, with_parts
from attn_compiler.index_expr.dividing import divide
from attn_compiler.index_expr.folding import EXACT_IN_EVERY_DTYPE, choice_of_numbers, has_value, may_hold, pinned_by
from tests.index_expr.expressions import COMPARISONS, expressions

B, H, Q, K = map(Index, "bhqk")


def test_numbers_of_different_kinds_are_different_constants() -> None:
    constants = [Const(value) for value in (True, 1, 1.0, False, 0, 0.0)]
    assert all(a != b for a, b in itertools.combinations(constants, 2))
    assert len(set(constants)) == 6
    assert Const(1) != 1


def test_a_nan_is_the_same_constant_as_another() -> None:
    assert Const(float("nan")) == Const(math.nan)
    assert hash(Const(float("nan"))) == hash(Const(math.nan))


@given(expressions())
def test_expressions_are_values(x: Expr) -> None:
    assert x == x
    assert hash(x) == hash(x)
    assert str(x) == str(x)


NUMBERS = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, -1.0]))
TENSOR_OPS = {
    "div": torch.div,
    "min": torch.minimum,
    "max": torch.maximum,
    "log": torch.log,
    "exp": torch.exp,
    "eq": torch.eq,
    "lt": torch.lt,
    "mul": torch.mul,
    "add": torch.add,
    "abs": torch.abs,
}


@pytest.mark.parametrize("op", TENSOR_OPS)
@given(data=st.data())
def test_ops_mean_what_they_mean_on_tensors(op: str, data: st.DataObject) -> None:
    """On infinities, NaN and divisions by zero too; in float64, as Python computes."""
    arity = OPS[op][1].count("{}")
    numbers = data.draw(st.tuples(*[NUMBERS] * arity))
    found = OPS[op][0](*numbers)
    wanted = TENSOR_OPS[op](*(torch.tensor(n, dtype=torch.float64) for n in numbers)).item()
    assert found == pytest.approx(wanted, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("divisor", [-3, -1, 1, 2, 5])
def test_division_of_whole_numbers_rounds_down(divisor: int) -> None:
    numbers = torch.arange(-7, 8)
    quotients = torch.div(numbers, divisor, rounding_mode="floor").tolist()
    assert [OPS["floordiv"][0](n, divisor) for n in numbers.tolist()] == quotients
    assert [OPS["mod"][0](n, divisor) for n in numbers.tolist()] == torch.remainder(numbers, divisor).tolist()


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (Q, "int"),
        (Const(True), "bool"),
        (Const(1), "int"),
        (Const(1.0), "float"),
        (Load("x", (Q,), "float"), "float"),
        (ix.compare("<=", K, Q), "bool"),
        (ix.apply("min", ix.compare("<=", K, Q), ix.compare("<=", Q, K)), "int"),
        (ix.apply("max", Q, Const(0.5)), "float"),
        (ix.where(Load("m", (K,), "bool"), Q, Const(True)), "int"),
        (ix.where(Load("m", (K,), "bool"), Q, Const(0.0)), "float"),
        (ix.add(Load("x", (Q,), "float"), Q), "float"),
        (ix.add(Q, Const(0.0)), "float"),
        (ix.mul(Q, Const(1.0)), "float"),
        (ix.apply("div", Q, K), "float"),
        (ix.apply("floordiv", Q, Const(2)), "int"),
    ],
)
def test_kind_of_a_value(x: Expr, kind: str) -> None:
    assert ix.kind_of(x) == kind


LENGTH = Load("length", (), "int")


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        ("floordiv", [7, 2], True),
        ("floordiv", [7, 0], False),
        ("mod", [7, 0], False),
        ("mod", [math.inf, 2], False),
        ("int", [2.5], True),
        ("int", [math.nan], False),
        ("int", [math.inf], False),
        ("rounded", [EXACT_IN_EVERY_DTYPE], True),
        ("rounded", [EXACT_IN_EVERY_DTYPE + 1], False),
        ("rounded", [0.5], False),
        ("div", [1.0, 2.0], False),
        ("exp", [0.0], False),
        ("min", [1, 2], True),
    ],
)
def test_what_is_nobodys_value_is_not_computed_while_compiling(op: str, values: list[float], expected: bool) -> None:
    assert has_value(op, list(values)) is expected


def test_a_choice_between_numbers_is_seen() -> None:
    later = ix.compare(">", K, Q)
    assert choice_of_numbers(ix.where(later, Const(1.5), Const(0.0))) == (later, Const(1.5), Const(0.0))
    assert choice_of_numbers(ix.where(later, ix.as_float(K), Const(0.0))) is None
    assert choice_of_numbers(Q) is None


@pytest.mark.parametrize(
    ("condition", "what", "expected"),
    [
        (ix.compare("==", Q, Const(3)), Index, (Q, Const(3))),
        (ix.compare("==", LENGTH, Const(3)), Load, (LENGTH, Const(3))),
        (ix.compare("==", LENGTH, Const(3)), Index, None),
        (ix.compare("!=", Q, Const(3)), Index, None),
        (ix.compare("==", Q, K), Index, None),
    ],
)
def test_a_condition_may_fix_one_name(
    condition: Expr, what: type[Index | Load], expected: tuple[Expr, Expr] | None
) -> None:
    assert pinned_by(condition, what) == expected


def test_what_surely_is_not_in_an_expression() -> None:
    inside = ix.add(Q, LENGTH)
    assert may_hold(inside, Q)
    assert may_hold(inside, LENGTH)
    assert not may_hold(inside, K)
    assert not may_hold(Q, inside)
    assert not may_hold(Q, LENGTH)


# Comparisons of whole numbers and floats with each other.
COMPARING_NUMBERS = st.sampled_from([-math.inf, -2.5, -1.0, -0.0, 0.5, 1.0, 2.0, 2.75, 1e30, math.inf, math.nan])


@settings(deadline=None)
@given(st.sampled_from(sorted(COMPARISONS)), COMPARING_NUMBERS, st.integers(0, 4), st.booleans())
def test_a_whole_number_against_a_float(op: str, number: float, q: int, turned: bool) -> None:
    sides: list[Expr] = [ix.as_float(Q), Const(number)]
    wanted = COMPARISONS[op](q, number)
    if turned:
        sides.reverse()
        wanted = COMPARISONS[op](number, q)
    found = ix.compare(op, *sides)
    assert ix.evaluate(found, {"q": q}, lambda *_: None) is wanted
    assert isinstance(found, ix.Test | Const)


def test_positions_as_floats_are_compared_as_whole_numbers() -> None:
    assert ix.compare("<=", ix.as_float(K), ix.as_float(Q)) == ix.compare("<=", K, Q)
    apart = ix.add(ix.as_float(Q), ix.as_float(K), -1)
    assert ix.compare("<", apart, Const(2.5)) == ix.compare("<=", ix.add(Q, K, -1), Const(2))


def test_truth_values_are_compared_as_numbers() -> None:
    flag = Load("flag", (K,), "bool")
    assert ix.compare("==", flag, Const(1.0)) == flag
    assert ix.compare("<", flag, ix.TRUE) == ix.invert(flag)
    assert ix.compare("==", ix.TRUE, Const(1.0)) == ix.TRUE


@pytest.mark.parametrize("op", COMPARISONS)
@pytest.mark.parametrize(("a", "b"), [(math.nan, 1.0), (1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (math.inf, math.nan)])
def test_floats_of_tensors(op: str, a: float, b: float) -> None:
    found = ix.compare(op, Load("x", (Q,), "float"), Load("y", (Q,), "float"))
    assert ix.evaluate(found, {"q": 0}, lambda name, _: {"x": a, "y": b}[name]) is COMPARISONS[op](a, b)


def test_comparisons_of_floats_with_nan_are_not_turned_round() -> None:
    x, y = Load("x", (Q,), "float"), Load("x", (K,), "float")
    assert ix.invert(ix.compare("<", x, y)) != ix.compare(">=", x, y)


def test_a_sum_with_a_choice_is_compared_in_each_branch() -> None:
    """transformers 4.57 adds the padding mask to a causal mask, and looks where that gives zero."""
    later, padding = ix.compare(">", Index("k"), Index("q")), Load("m", (Index("b"), Index("k")), "int")
    total = ix.add(ix.where(later, Const(-3e38), Const(0.0)), ix.apply("rounded", padding))
    asked = ix.compare("==", total, Const(0.0))
    assert asked == ix.apply("and", ix.invert(later), ix.compare("==", padding, ix.ZERO))


def test_a_sum_with_a_whole_number_equals_only_what_it_can_reach() -> None:
    """A row of ids may hold any number of int64."""
    later, ids = ix.compare(">", Index("k"), Index("q")), Load("ids", (Index("b"), Index("k")), "int")
    for fill, is_settled in ((-3e38, True), (-1e20, True), (-1e18, False), (-65504.0, False)):
        total = ix.add(ix.where(later, Const(fill), Const(0.0)), ix.apply("rounded", ids))
        asked = ix.compare("==", total, Const(0.0))
        assert (asked == ix.apply("and", ix.invert(later), ix.compare("==", ids, ix.ZERO))) is is_settled


RANGES = {"b": Linear((), 2), "h": Linear((), 3)}


def _flat(heads: int, const: int = 0) -> Expr:
    return ix.add(ix.add(ix.mul(B, Const(heads)), H), Const(const))


def _by(op: str, x: Expr, divisor: int) -> Expr:
    return ix.apply(op, x, Const(divisor))


def test_an_index_of_two_axes_in_one_is_taken_apart() -> None:
    assert divide(_by("floordiv", _flat(4), 4), RANGES) == B
    assert divide(_by("mod", _flat(4), 4), RANGES) == H
    assert divide(_by("floordiv", _flat(4, 8), 4), RANGES) == ix.add(B, Const(2))
    assert divide(_by("mod", H, 4), RANGES) == H
    assert divide(_by("floordiv", H, 4), RANGES) == Const(0)


@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_what_may_reach_the_divisor_stays(op: str) -> None:
    for x in (_by(op, _flat(3), 3), _by(op, _flat(4, 1), 4), _by(op, _flat(4), 8), _by(op, Index("q"), 4)):
        assert isinstance(divide(x, RANGES), Apply)
    unknown = {"b": Linear((), 2), "h": Linear(((Size("s0"), 1),), -1)}
    assert isinstance(divide(_by(op, _flat(4), 4), unknown), Apply)


def test_divisions_inside_of_everything_are_carried_out() -> None:
    rest = _by("mod", _flat(4), 4)
    x = ix.where(ix.compare("<=", rest, Const(1)), Load("table", (rest,), "float"), Const(0.0))
    assert divide(x, RANGES) == ix.where(ix.compare("<=", H, Const(1)), Load("table", (H,), "float"), Const(0.0))


@given(
    st.integers(-6, 6), st.integers(-6, 6), st.integers(-9, 9), st.integers(1, 6), st.sampled_from(["floordiv", "mod"])
)
def test_what_is_carried_out_is_the_same_everywhere(x: int, y: int, const: int, divisor: int, op: str) -> None:
    form = ix.add(ix.add(ix.mul(B, Const(x)), ix.mul(H, Const(y))), Const(const))
    before = _by(op, form, divisor)
    after = divide(before, RANGES)
    for b, h in itertools.product(range(3), range(4)):
        values = {"b": b, "h": h}
        load = lambda *_: None  # noqa: E731
        assert ix.evaluate(after, values, load) == ix.evaluate(before, values, load)


def test_parts_are_changed_and_the_form_is_normal_again() -> None:
    form = ix.add(ix.mul(K, Const(2)), Q)
    assert with_parts(form, lambda part: Q) == ix.mul(Q, Const(3))
    assert with_parts(ix.compare("<=", K, Q), lambda part: Const(-1)) == ix.FALSE
    assert with_parts(ix.where(ix.compare("<=", K, Q), K, Q), lambda part: Const(1)) == Const(1)
    assert with_parts(K, lambda part: Q) == K


def test_loads_are_renamed_wherever_they_stand() -> None:
    inner = Load("index", (Q, K), "int")
    x = ix.mul(Load("table", (ix.add(inner, Const(1)),), "float"), Load("scale", (), "float"))
    renamed = rename(x, lambda name: name.upper())
    assert {load.tensor for load in ix.loads(renamed)} == {"TABLE", "INDEX", "SCALE"}
    assert rename(renamed, lambda name: name.lower()) == x


def test_a_load_gets_its_new_name_once() -> None:
    """Where the new name of one tensor is the old one of another, a load that is renamed twice reads the other tensor."""
    names = {"add_2": "add", "add": "add'"}
    x = ix.compare(">=", Load("add_2", (K,), "int"), Const(0))
    assert {load.tensor for load in ix.loads(x)} == {"add_2"}
    assert {load.tensor for load in ix.loads(rename(x, names.__getitem__))} == {"add"}
    both = ix.compare(">=", Load("add_2", (K,), "int"), Load("add", (Q,), "int"))
    assert {load.tensor: load.at for load in ix.loads(rename(both, names.__getitem__))} == {
        "add": (K,),
        "add'": (Q,),
    }
