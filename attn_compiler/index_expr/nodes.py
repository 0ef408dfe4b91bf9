"""The expressions: frozen data, with the ops that they apply and what kind of value each gives. Build them by building.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A number or a truth value. Unlike in Python, 1, 1.0 and true are three constants, and a NaN equals itself."""

    value: bool | int | float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)


@dataclass(frozen=True, slots=True)
class Index:
    """An index: "b", "h", "q", "k" of the score, or the bound variable of a scan. It is a whole number >= 0."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """A size that is symbolic while compiling; >= 1 wherever an index runs below it."""

    name: str


@dataclass(frozen=True, slots=True)
class Load:
    """An element of a tensor that is only known at run time. kind: "bool", "int" or "float"."""

    tensor: str
    at: tuple[Expr, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Linear:
    """const + sum of coefficient · term over whole numbers. Terms are sorted by their text and no coefficient is zero."""

    terms: tuple[tuple[Expr, int], ...]
    const: int = 0


@dataclass(frozen=True, slots=True)
class Test:
    """A linear form compared with zero. relation: ">=", "==" or "!="."""

    relation: str
    form: Linear


@dataclass(frozen=True, slots=True)
class Apply:
    """Any other op of OPS on its arguments."""

    op: str
    args: tuple[Expr, ...]


Expr = Const | Index | Size | Load | Linear | Test | Apply

TRUE, FALSE, ZERO, ONE = Const(True), Const(False), Const(0), Const(1)


def _divided(a: float, b: float) -> float:
    """a / b as tensors divide: 1 / 0 is infinite, 0 / 0 is NaN."""
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _logarithm(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


def _exponential(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _power(a: float, b: float) -> float:
    """a to the power of b, as floats: NaN where no real number is."""
    try:
        return math.pow(a, b)
    except OverflowError:
        return math.inf if a > 0 or b % 2 == 0 else -math.inf
    except ValueError:
        return math.inf if a == 0 else math.nan


def _least(a: float, b: float) -> float:
    """As torch.minimum: a NaN on either side is the result."""
    return a if math.isnan(a) else b if math.isnan(b) else min(a, b)


def _largest(a: float, b: float) -> float:
    return a if math.isnan(a) else b if math.isnan(b) else max(a, b)


#: ops that are kept as they are: name -> (meaning on numbers, how it is printed). "float" loses nothing; "rounded" is the
#: nearest number of a float dtype, and here the number itself
OPS: dict[str, tuple[Callable[..., Any], str]] = {
    "and": (lambda *xs: all(xs), " ∧ "),
    "or": (lambda *xs: any(xs), " ∨ "),
    "not": (lambda x: not x, "¬{}"),
    "where": (lambda c, a, b: a if c else b, "({} ? {} : {})"),
    "floordiv": (lambda a, b: a // b, "({} // {})"),
    "mod": (lambda a, b: a % b, "({} % {})"),
    "mul": (lambda a, b: a * b, "({} · {})"),
    "add": (lambda a, b: a + b, "({} + {})"),
    "div": (_divided, "({} / {})"),
    "abs": (abs, "|{}|"),
    "min": (_least, "min({}, {})"),
    "max": (_largest, "max({}, {})"),
    "eq": (lambda a, b: a == b, "({} = {})"),
    "lt": (lambda a, b: a < b, "({} < {})"),
    "float": (float, "float({})"),
    "rounded": (float, "float({})"),
    "int": (int, "int({})"),
    "log": (_logarithm, "log({})"),
    "exp": (_exponential, "exp({})"),
    "pow": (_power, "({} ^ {})"),
    "xor": (lambda a, b: bool(a) != bool(b), "({} ⊕ {})"),
}


def kind_of(x: Expr) -> str:
    """ "bool", "int" or "float"."""
    match x:
        case Const(value=bool()):
            return "bool"
        case Const(value=int()) | Index() | Size() | Linear():
            return "int"
        case Const():
            return "float"
        case Load(kind=kind):
            return kind
        case Test():
            return "bool"
        case Apply(op="and" | "or" | "not" | "eq" | "lt" | "xor"):
            return "bool"
        case Apply(op="where", args=(_, a, b)):
            return kind_of(a) if kind_of(a) == kind_of(b) else "float"
        case Apply(op="float" | "rounded" | "div" | "log" | "exp" | "pow"):
            return "float"
        case Apply(op="int" | "floordiv" | "mod"):
            return "int" if x.op == "int" or all(kind_of(a) == "int" for a in x.args) else "float"
        case Apply(args=args):
            return "int" if all(kind_of(a) == "int" for a in args) else "float"
