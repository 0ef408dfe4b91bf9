"""The expressions: frozen data, with the ops that they apply and what kind of value each gives. Build them by building.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Const:
    """A number or a truth value."""

    value: bool | int | float


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


#: ops that are kept as they are: name -> (meaning on numbers, how it is printed)
OPS: dict[str, tuple[Callable[..., Any], str]] = {
    "and": (lambda *xs: all(xs), " ∧ "),
    "or": (lambda *xs: any(xs), " ∨ "),
    "not": (lambda x: not x, "¬{}"),
    "where": (lambda c, a, b: a if c else b, "({} ? {} : {})"),
    "floordiv": (lambda a, b: a // b, "({} // {})"),
    "mod": (lambda a, b: a % b, "({} % {})"),
    "mul": (lambda a, b: a * b, "({} · {})"),
    "add": (lambda a, b: a + b, "({} + {})"),
    "div": (lambda a, b: a / b, "({} / {})"),
    "abs": (abs, "|{}|"),
    "min": (min, "min({}, {})"),
    "max": (max, "max({}, {})"),
    "eq": (lambda a, b: a == b, "({} = {})"),
    "lt": (lambda a, b: a < b, "({} < {})"),
    "float": (float, "float({})"),
    "int": (int, "int({})"),
    "log": (math.log, "log({})"),
    "exp": (math.exp, "exp({})"),
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
        case Apply(op="float" | "div" | "log" | "exp"):
            return "float"
        case Apply(op="int" | "floordiv" | "mod"):
            return "int" if x.op == "int" or all(kind_of(a) == "int" for a in x.args) else "float"
        case Apply(args=args):
            return "int" if all(kind_of(a) == "int" for a in args) else "float"
