"""The expressions: frozen data, the ops they apply, and the kind of each value. Build them by building.py.

Each expression holds facts about itself (`Facts`) from its construction, so no query walks through its parts, and digests compare
expressions. Expressions share their parts: a result about a part is remembered with the part (`remembered`), once for all expressions that
contain it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Facts(NamedTuple):
    """Facts of an expression.

    digest: of its whole structure; equal just for equal expressions. kind: of its value. size: number of parts, one that occurs twice
    counted twice. depth: of nesting. indices, sizes: the names in it. tensors: the names of the run-time tensors that it reads.
    """

    digest: bytes
    kind: str
    size: int
    depth: int
    indices: frozenset[str]
    sizes: frozenset[str]
    tensors: frozenset[str]

    @property
    def has_loads(self) -> bool:
        """True if it reads any run-time tensor."""
        return bool(self.tensors)


_NO_NAMES: frozenset[str] = frozenset()


class _Node:
    """facts: see Facts. remembered: results computed about this expression, by key; never visible outside."""

    __slots__ = ("facts", "remembered")

    facts: Facts
    remembered: dict[Any, Any]

    def _know(self, head: tuple[object, ...], below: tuple[Expr, ...], kind: str) -> None:
        """Set the facts, once at construction. head: all but the parts."""
        digests = [f"{type(self).__name__}{head}{len(below)}".encode()]
        size, depth = 1, 0
        indices = sizes = tensors = _NO_NAMES
        for part in below:
            facts = part.facts
            digests.append(facts.digest)
            size += facts.size
            depth = max(depth, facts.depth)
            if not facts.tensors <= tensors:
                tensors = facts.tensors if tensors <= facts.tensors else tensors | facts.tensors
            if not facts.indices <= indices:
                indices = facts.indices if indices <= facts.indices else indices | facts.indices
            if not facts.sizes <= sizes:
                sizes = facts.sizes | sizes
        digest = hashlib.blake2b(b"".join(digests), digest_size=16).digest()
        self._set(Facts(digest, kind, size, depth + 1, indices, sizes, tensors))

    def _set(self, facts: Facts) -> None:
        object.__setattr__(self, "facts", facts)
        object.__setattr__(self, "remembered", {})

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Node) and self.facts.digest == other.facts.digest)

    def __hash__(self) -> int:
        return hash(self.facts.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild a copy as the original was built."""
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class Const(_Node):
    """A number or a truth value. Unlike in Python, 1, 1.0 and true are three constants, and a NaN equals itself."""

    value: bool | int | float

    def __post_init__(self) -> None:
        kind = "bool" if isinstance(self.value, bool) else "int" if isinstance(self.value, int) else "float"
        self._know((type(self.value).__name__, self.value), (), kind)


@dataclass(frozen=True, slots=True, eq=False)
class Index(_Node):
    """An index, an integer >= 0: "b", "h", "q", "k" of the score, or the bound variable of a scan."""

    name: str

    def __post_init__(self) -> None:
        self._know((self.name,), (), "int")
        self._set(self.facts._replace(indices=frozenset((self.name,))))


@dataclass(frozen=True, slots=True, eq=False)
class Size(_Node):
    """A size that is symbolic while compiling; >= 1 wherever an index runs below it."""

    name: str

    def __post_init__(self) -> None:
        self._know((self.name,), (), "int")
        self._set(self.facts._replace(sizes=frozenset((self.name,))))


@dataclass(frozen=True, slots=True, eq=False)
class Load(_Node):
    """An element of a tensor that is only known at run time. kind: "bool", "int" or "float"."""

    tensor: str
    at: tuple[Expr, ...]
    kind: str

    def __post_init__(self) -> None:
        self._know((self.tensor, self.kind), self.at, self.kind)
        self._set(self.facts._replace(tensors=self.facts.tensors | {self.tensor}))


@dataclass(frozen=True, slots=True, eq=False)
class Linear(_Node):
    """const + sum of coefficient · term over integers. Terms are sorted (`place`) and no coefficient is zero."""

    terms: tuple[tuple[Expr, int], ...]
    const: int = 0

    def __post_init__(self) -> None:
        self._know((self.const, [factor for _, factor in self.terms]), tuple([term for term, _ in self.terms]), "int")


@dataclass(frozen=True, slots=True, eq=False)
class Test(_Node):
    """A linear form compared with zero. relation: ">=", "==" or "!="."""

    relation: str
    form: Linear

    def __post_init__(self) -> None:
        self._know((self.relation,), (self.form,), "bool")


@dataclass(frozen=True, slots=True, eq=False)
class Apply(_Node):
    """Any other op of OPS on its arguments."""

    op: str
    args: tuple[Expr, ...]

    def __post_init__(self) -> None:
        self._know((self.op,), self.args, _kind_of_result(self.op, self.args))


Expr = Const | Index | Size | Load | Linear | Test | Apply


def _kind_of_result(op: str, args: tuple[Expr, ...]) -> str:
    if op in ("and", "or", "not", "eq", "lt", "xor"):
        return "bool"
    if op in ("float", "rounded", "div", "log", "exp", "pow"):
        return "float"
    if op == "int":
        return "int"
    kinds = {a.facts.kind for a in (args[1:] if op == "where" else args)}
    if op == "where":
        return kinds.pop() if len(kinds) == 1 else "float"
    return "int" if kinds <= {"int"} else "float"


def kind_of(x: Expr) -> str:
    """Return "bool", "int" or "float"."""
    return x.facts.kind


TRUE, FALSE, ZERO, ONE = Const(True), Const(False), Const(0), Const(1)


def _divided(a: float, b: float) -> float:
    """Return a / b as tensors divide: 1 / 0 is infinite, 0 / 0 is NaN."""
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
    """Return a to the power of b as floats: NaN if no real number is."""
    try:
        return math.pow(a, b)
    except OverflowError:
        return math.inf if a > 0 or b % 2 == 0 else -math.inf
    except ValueError:
        return math.inf if a == 0 else math.nan


def _least(a: float, b: float) -> float:
    """Return the minimum as torch.minimum does: a NaN on either side is the result."""
    return a if math.isnan(a) else b if math.isnan(b) else min(a, b)


def _largest(a: float, b: float) -> float:
    return a if math.isnan(a) else b if math.isnan(b) else max(a, b)


#: ops that are kept as they are: name -> (function of numbers, format). "float" is exact; "rounded" is the
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
