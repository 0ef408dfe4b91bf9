from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import OPS, Const, Expr, Index, Load
from tests.index_expr.expressions import expressions

Q, K = Index("q"), Index("k")


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
