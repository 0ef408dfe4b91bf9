"""Random expressions, each in two forms: as the builders make it, and as a tree that nothing has simplified, with its own meaning.

`bools`, `ints`, `floats` are Hypothesis strategies of trees. `Tree.build()` is the expression, `Tree.value(point)` the oracle.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load, Size

INDICES = ("b", "h", "q", "k")
SIZES = ("s0", "s1")

#: elements of run-time tensors, chosen by the indices
_ELEMENTS: dict[str, tuple[bool | int | float, ...]] = {
    "bool": (True, False, True),
    "int": (0, -2, 3, 1, 0),
    "float": (0.5, math.nan, 0.0, -1.5, math.inf, 1.0),
}

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}


def element(tensor: str, at: tuple[int, ...]) -> Any:
    """What a tensor named after its kind holds at these indices, whichever they are."""
    elements = _ELEMENTS[tensor]
    return elements[(3 * sum((i + 1) * n for i, n in enumerate(at)) + len(at)) % len(elements)]


@dataclass(frozen=True)
class Tree:
    """op: one of the cases of `value` and `build`. payload: a constant, a name, or which comparison. kind: of its value."""

    op: str
    args: tuple[Tree, ...] = ()
    payload: Any = None
    kind: str = "int"

    def value(self, point: Mapping[str, int]) -> Any:
        """The meaning in plain Python, without any rule. Raises ArithmeticError or ValueError where there is none."""
        if self.op == "where":
            chosen = self.args[1] if self.args[0].value(point) else self.args[2]
            return _PYTHON[self.kind](chosen.value(point))
        values = [arg.value(point) for arg in self.args]
        match self.op:
            case "const":
                return self.payload
            case "name":
                return point[self.payload]
            case "load":
                return element(self.payload, tuple(values))
            case "compare":
                return COMPARISONS[self.payload](*values)
            case "and":
                return all(values)
            case "or":
                return any(values)
            case _:
                return _PYTHON[self.kind](_MEANING[self.op](*values))

    def build(self) -> Expr:
        """The same through the builders."""
        args = [arg.build() for arg in self.args]
        match self.op:
            case "const":
                return Const(self.payload)
            case "name":
                return Size(self.payload) if self.payload in SIZES else Index(self.payload)
            case "load":
                return Load(self.payload, tuple(args), self.payload)
            case "compare":
                return ix.compare(self.payload, *args)
            case "add":
                return ix.add(*args)
            case "sub":
                return ix.add(*args, -1)
            case "mul":
                return ix.mul(*args)
            case "as_int" | "as_bool" | "as_float":
                return getattr(ix, self.op)(*args)  # type: ignore[no-any-return]
            case _:
                return ix.apply(self.op, *args)

    def __str__(self) -> str:
        return f"{self.op}{'' if self.payload is None else ':' + str(self.payload)}({', '.join(map(str, self.args))})"


_PYTHON: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float}

_MEANING: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "abs": abs,
    "min": lambda a, b: math.nan if a != a or b != b else min(a, b),
    "max": lambda a, b: math.nan if a != a or b != b else max(a, b),
    "not": operator.not_,
    "xor": lambda a, b: a is not b,
    "as_int": int,
    "as_bool": bool,
    "as_float": float,
    "int": int,
    "float": float,
}


def is_same(a: Any, b: Any) -> bool:
    """Equal and of one type; a NaN is equal to a NaN."""
    return type(a) is type(b) and (a == b or (a != a and b != b))


# ---- strategies -----------------------------------------------------------------------------------------------------

Trees = st.SearchStrategy[Tree]


def _node(kind: str, op: str, *args: Trees, payload: st.SearchStrategy[Any] | None = None) -> Trees:
    return st.builds(Tree, st.just(op), st.tuples(*args), st.none() if payload is None else payload, st.just(kind))


def ints(depth: int = 3) -> Trees:
    """Whole numbers; divisors are constants that are not 0, of either sign."""
    leaves = st.one_of(
        _node("int", "name", payload=st.sampled_from(INDICES + SIZES)),
        _node("int", "const", payload=st.integers(-4, 4)),
    )
    if depth == 0:
        return leaves
    one, condition = ints(depth - 1), bools(depth - 1)
    divisor = _node("int", "const", payload=st.sampled_from([-3, -1, 1, 2, 4]))
    return st.one_of(
        leaves,
        *(_node("int", op, one, one) for op in ("add", "sub", "min", "max")),
        _node("int", "mul", one, leaves),
        *(_node("int", op, one, divisor) for op in ("floordiv", "mod")),
        _node("int", "abs", one),
        _node("int", "where", condition, one, one),
        _node("int", "as_int", condition),
        _node("int", "add", condition, one),
        _node("int", "int", floats(depth - 1)),
        *(_node("int", "load", *[one] * rank, payload=st.just("int")) for rank in (1, 2)),
    )


def floats(depth: int = 3) -> Trees:
    """Floats with infinities and NaN; whole numbers and truth values among the operands."""
    leaves = _node(
        "float", "const", payload=st.sampled_from([0.0, 1.0, -1.0, 0.5, -3.4e38, math.inf, -math.inf, math.nan])
    )
    if depth == 0:
        return leaves
    one, whole, condition = floats(depth - 1), ints(depth - 1), bools(depth - 1)
    return st.one_of(
        leaves,
        *(_node("float", op, one, one) for op in ("add", "sub", "mul", "min", "max")),
        *(_node("float", op, one, whole) for op in ("add", "mul", "max")),
        _node("float", "mul", one, condition),
        _node("float", "abs", one),
        _node("float", "where", condition, one, st.one_of(one, whole)),
        _node("float", "as_float", st.one_of(whole, condition)),
        _node("float", "load", whole, payload=st.just("float")),
    )


def bools(depth: int = 3) -> Trees:
    """Comparisons of all kinds, and what is made of them."""
    leaves = _node("bool", "const", payload=st.booleans())
    if depth == 0:
        return leaves
    one, whole, real = bools(depth - 1), ints(depth - 1), floats(depth - 1)
    anything = st.one_of(one, whole, real)
    comparison = st.sampled_from(list(COMPARISONS))
    return st.one_of(
        leaves,
        *(_node("bool", "compare", x, y, payload=comparison) for x, y in ((whole, whole), (real, whole), (real, real))),
        _node("bool", "compare", one, anything, payload=comparison),
        *(_node("bool", op, *[one] * arity) for op in ("and", "or") for arity in (2, 3)),
        _node("bool", "not", one),
        _node("bool", "xor", one, one),
        _node("bool", "where", one, one, one),
        _node("bool", "as_bool", anything),
        _node("bool", "load", whole, payload=st.just("bool")),
    )


def points() -> st.SearchStrategy[dict[str, int]]:
    """A number for each index and size."""
    return st.fixed_dictionaries(
        {name: st.integers(0, 5) for name in INDICES} | {name: st.integers(1, 6) for name in SIZES}
    )


def expressions(depth: int = 2) -> st.SearchStrategy[Expr]:
    """Expressions of any kind, as the builders make them."""
    return st.one_of(bools(depth), ints(depth), floats(depth)).map(Tree.build)
