"""The small language that masks and biases are recovered in: expressions over the indices (b, h, q, k) of a score. Pure data.

Expressions are built by `apply` and its relatives only, which keep a normal form: numbers are folded, integer arithmetic is a
linear form, an integer comparison is one of `form >= 0`, `form == 0`, `form != 0`, and conjunctions are flat and sorted. So two
spellings of one mask meet in equal expressions, and `evaluate` gives the meaning back on real numbers and tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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


# ---- building ------------------------------------------------------------------------------------------------------


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


def linear(x: Expr) -> Linear:
    """A whole-number expression as a linear form."""
    match x:
        case Linear():
            return x
        case Const(value=value):
            return Linear((), int(value))
        case _:
            return Linear(((x, 1),))


def combine(a: Linear, b: Linear, factor: int) -> Linear:
    """a + factor · b."""
    terms = dict(a.terms)
    for term, coefficient in b.terms:
        terms[term] = terms.get(term, 0) + factor * coefficient
    kept = sorted(((t, c) for t, c in terms.items() if c), key=lambda tc: str(tc[0]))
    return Linear(tuple(kept), a.const + factor * b.const)


def _plain(form: Linear) -> Expr:
    """A linear form without needless wrapping."""
    if not form.terms:
        return Const(form.const)
    if form.const == 0 and len(form.terms) == 1 and form.terms[0][1] == 1:
        return form.terms[0][0]
    return form


def add(a: Expr, b: Expr, factor: int = 1) -> Expr:
    """a + factor · b."""
    if kind_of(a) != "float" and kind_of(b) != "float":
        return _plain(combine(linear(as_int(a)), linear(as_int(b)), factor))
    if factor != 1:
        b = mul(b, Const(factor))
    if isinstance(a, Const) and a.value == 0:
        return b
    if isinstance(b, Const) and b.value == 0:
        return a
    return _lifted("add", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    """a · b."""
    if isinstance(a, Const) and not isinstance(b, Const):
        a, b = b, a
    if kind_of(a) != "float" and kind_of(b) != "float":
        a, b = as_int(a), as_int(b)
        if isinstance(b, Const):
            return _plain(combine(Linear(()), linear(a), int(b.value)))
    if isinstance(b, Const) and b.value == 1:
        return a
    return _lifted("mul", a, b)


def as_int(x: Expr) -> Expr:
    """A truth value as 0 or 1; whole numbers as they are."""
    if isinstance(x, Const) and isinstance(x.value, bool):
        return Const(int(x.value))
    return where(x, ONE, ZERO) if kind_of(x) == "bool" else x


def as_bool(x: Expr) -> Expr:
    """x != 0."""
    if kind_of(x) == "bool":
        return x
    if kind_of(x) == "int":
        return test("!=", linear(x))
    if isinstance(x, Const):
        return Const(x.value != 0)
    if isinstance(x, Apply) and x.op == "where":
        return where(x.args[0], as_bool(x.args[1]), as_bool(x.args[2]))
    return invert(apply("eq", x, Const(0.0)))


def test(relation: str, form: Linear) -> Expr:
    """The comparison of a linear form with zero, in a normal form: an equation's leading coefficient is positive."""
    if not form.terms:
        return Const({">=": form.const >= 0, "==": form.const == 0, "!=": form.const != 0}[relation])
    if relation != ">=" and form.terms[0][1] < 0:
        form = combine(Linear(()), form, -1)
    chosen = _test_of_choice(relation, form)
    return chosen if chosen is not None else Test(relation, form)


def _test_of_choice(relation: str, form: Linear) -> Expr | None:
    """A test on a single `c ? a : b` of numbers is a test for each of them."""
    if len(form.terms) != 1:
        return None
    (term, factor), const = form.terms[0], form.const
    if not isinstance(term, Apply) or term.op != "where" or not all(isinstance(v, Const) for v in term.args[1:]):
        return None
    yes, no = (test(relation, Linear((), factor * int(v.value) + const)) for v in term.args[1:])  # type: ignore[union-attr]
    return where(term.args[0], yes, no)


def compare(op: str, a: Expr, b: Expr) -> Expr:
    """a op b for op in <=, <, >=, >, ==, !=."""
    if kind_of(a) == kind_of(b) == "bool" and op in ("==", "!="):
        different = apply("xor", a, b)
        return different if op == "!=" else invert(different)
    if "float" in (kind_of(a), kind_of(b)):
        return _compare_floats(op, a, b)
    x, y = linear(as_int(a)), linear(as_int(b))
    match op:
        case "<=":
            return test(">=", combine(y, x, -1))
        case "<":
            return test(">=", combine(combine(y, x, -1), Linear((), 1), -1))
        case ">=":
            return test(">=", combine(x, y, -1))
        case ">":
            return test(">=", combine(combine(x, y, -1), Linear((), 1), -1))
        case _:
            return test(op, combine(x, y, -1))


def _compare_floats(op: str, a: Expr, b: Expr) -> Expr:
    chosen = _comparison_of_choice(op, a, b)
    if chosen is not None:
        return chosen
    match op:
        case "==":
            return apply("eq", a, b)
        case "!=":
            return invert(apply("eq", a, b))
        case "<":
            return apply("lt", a, b)
        case ">":
            return apply("lt", b, a)
        case _:
            # Not `invert(b < a)`: with a NaN both are false.
            less = apply("lt", a, b) if op == "<=" else apply("lt", b, a)
            return apply("or", less, apply("eq", a, b))


def _comparison_of_choice(op: str, a: Expr, b: Expr) -> Expr | None:
    """A comparison of `c ? x : y` with a number is one for each of x and y, if those are numbers."""
    for choice, other, turned in ((a, b, False), (b, a, True)):
        if isinstance(choice, Apply) and choice.op == "where" and isinstance(other, Const):
            condition, *numbers = choice.args
            if all(isinstance(number, Const) for number in numbers):
                pairs = [(other, number) if turned else (number, other) for number in numbers]
                return where(condition, *(_compare_floats(op, *pair) for pair in pairs))
    return None


def invert(x: Expr) -> Expr:
    """Not x, with the negation carried inwards."""
    match x:
        case Const(value=value):
            return Const(not value)
        case Test(relation=">=", form=form):
            return test(">=", combine(Linear((), -1), form, -1))
        case Test(relation="==", form=form):
            return test("!=", form)
        case Test(form=form):
            return test("==", form)
        case Apply(op="not", args=(inner,)):
            return inner
        case Apply(op="and", args=args):
            return apply("or", *map(invert, args))
        case Apply(op="or", args=args):
            return apply("and", *map(invert, args))
        case _:
            return Apply("not", (x,))


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    """a where the condition holds, else b."""
    if isinstance(condition, Const):
        return a if condition.value else b
    if a == b:
        return a
    if kind_of(a) == kind_of(b) == "bool":
        return _where_bools(condition, a, b)
    pinned = _pinned(condition)
    if pinned is not None and substitute(b, *pinned) == substitute(a, *pinned):
        return b
    return Apply("where", (condition, a, b))


def _where_bools(condition: Expr, a: Expr, b: Expr) -> Expr:
    if a == TRUE:
        return apply("or", condition, b)
    if b == FALSE:
        return apply("and", condition, a)
    if a == FALSE:
        return apply("and", invert(condition), b)
    if b == TRUE:
        return apply("or", invert(condition), a)
    return apply("or", apply("and", condition, a), apply("and", invert(condition), b))


def _pinned(condition: Expr) -> tuple[Expr, Expr] | None:
    """(index, value) if the condition says that one index has one value."""
    if isinstance(condition, Test) and condition.relation == "==" and len(condition.form.terms) == 1:
        (term, factor), const = condition.form.terms[0], condition.form.const
        if isinstance(term, Index) and const % factor == 0:
            return term, Const(-const // factor)
    return None


def _lifted(op: str, a: Expr, b: Expr) -> Expr:
    """A float op; on a choice between numbers it is done to each of them."""
    if isinstance(a, Const) and isinstance(b, Const):
        return Const(OPS[op][0](a.value, b.value))
    for x, y, swap in ((a, b, False), (b, a, True)):
        if isinstance(x, Apply) and x.op == "where" and isinstance(y, Const):
            yes, no = x.args[1:]
            if isinstance(yes, Const) and isinstance(no, Const):
                pairs = ((y, yes), (y, no)) if swap else ((yes, y), (no, y))
                return where(x.args[0], *(_lifted(op, *p) for p in pairs))
    return Apply(op, (a, b))


def apply(op: str, *args: Expr) -> Expr:
    """An op of OPS in normal form."""
    if op in ("and", "or"):
        return _junction(op, args)
    if op == "not":
        return invert(args[0])
    if op == "where":
        return where(*args)
    if all(isinstance(a, Const) for a in args):
        return Const(OPS[op][0](*(a.value for a in args)))  # type: ignore[union-attr]
    if op == "xor":
        return _xor(*args)
    if op == "float" and isinstance(args[0], Apply) and args[0].op == "where":
        condition, a, b = args[0].args
        return where(condition, apply("float", a), apply("float", b))
    if op == "float" and kind_of(args[0]) == "bool":
        return where(args[0], Const(1.0), Const(0.0))
    if op in ("floordiv", "mod") and args[1] == ONE:
        return args[0] if op == "floordiv" else ZERO
    if op in ("min", "max") and args[0] == args[1]:
        return args[0]
    return Apply(op, args)


def _xor(a: Expr, b: Expr) -> Expr:
    if isinstance(a, Const):
        a, b = b, a
    if isinstance(b, Const):
        return invert(a) if b.value else a
    return FALSE if a == b else Apply("xor", (a, b))


def _junction(op: str, args: tuple[Expr, ...]) -> Expr:
    neutral, absorbing = (TRUE, FALSE) if op == "and" else (FALSE, TRUE)
    flat: dict[Expr, None] = {}
    for arg in args:
        for part in arg.args if isinstance(arg, Apply) and arg.op == op else (arg,):
            if part == absorbing:
                return absorbing
            if part != neutral:
                flat[part] = None
    if any(invert(part) in flat for part in flat):
        return absorbing
    parts = sorted(flat, key=str)
    return neutral if not parts else parts[0] if len(parts) == 1 else Apply(op, tuple(parts))


def substitute(x: Expr, index: Expr, by: Expr) -> Expr:
    """x with every occurrence of an index replaced, in normal form again."""
    match x:
        case _ if x == index:
            return by
        case Linear(terms=terms, const=const):
            total: Expr = Const(const)
            for term, factor in terms:
                total = add(total, mul(substitute(term, index, by), Const(factor)))
            return total
        case Test(relation=relation, form=form):
            return test(relation, linear(substitute(form, index, by)))
        case Load(tensor=tensor, at=at, kind=kind):
            return Load(tensor, tuple(substitute(a, index, by) for a in at), kind)
        case Apply(op=op, args=args):
            return rebuilt(op, tuple(substitute(a, index, by) for a in args))
        case _:
            return x


def mentions(x: Expr, index: Index) -> bool:
    """Whether the index occurs anywhere in x."""
    match x:
        case Index():
            return x == index
        case Linear(terms=terms):
            return any(mentions(term, index) for term, _ in terms)
        case Test(form=form):
            return mentions(form, index)
        case Load(at=args) | Apply(args=args):
            return any(mentions(a, index) for a in args)
        case _:
            return False


def loads(x: Expr) -> Iterator[Load]:
    """Every load in x, outermost first."""
    match x:
        case Load(at=at):
            yield x
            for a in at:
                yield from loads(a)
        case Linear(terms=terms):
            for term, _ in terms:
                yield from loads(term)
        case Test(form=form):
            yield from loads(form)
        case Apply(args=args):
            for a in args:
                yield from loads(a)


def rebuilt(op: str, args: tuple[Expr, ...]) -> Expr:
    """apply, for ops that have a builder of their own too."""
    if op == "add":
        return add(args[0], args[1])
    return mul(*args) if op == "mul" else apply(op, *args)


# ---- ranges --------------------------------------------------------------------------------------------------------

#: largest value of each index, as a linear form: {"q": Sq - 1, "k": Skv - 1}
Ranges = Mapping[str, Linear]


def decide(x: Expr, ranges: Ranges) -> Expr:
    """x with every comparison settled that holds (or fails) for all indices in their ranges."""
    match x:
        case Test(relation=relation, form=form):
            return _decided(relation, form, ranges) or x
        case Apply(op=op, args=args):
            return rebuilt(op, tuple(decide(a, ranges) for a in args))
        case _:
            return x


def _decided(relation: str, form: Linear, ranges: Ranges) -> Expr | None:
    low, high = (_bound(form, ranges, lowest=lowest) for lowest in (True, False))
    if relation == ">=":
        if low is not None and low >= 0:
            return TRUE
        return FALSE if high is not None and high < 0 else None
    apart = (low is not None and low > 0) or (high is not None and high < 0)
    return Const(relation == "!=") if apart else None


def _bound(form: Linear, ranges: Ranges, *, lowest: bool) -> int | None:
    """A number that the form never goes below (above), if there is one. Sizes are at least 1."""
    rest = form
    for term, factor in form.terms:
        if isinstance(term, Index) and (factor > 0) != lowest:
            if term.name not in ranges:
                return None
            rest = combine(rest, combine(ranges[term.name], linear(term), -1), factor)
    total = rest.const
    for term, factor in rest.terms:
        if isinstance(term, Index) and (factor > 0) == lowest:
            continue
        if isinstance(term, Size) and (factor > 0) == lowest:
            total += factor
            continue
        return None
    return total


def lower_bound(x: Expr) -> int | None:
    """A number that a whole-number expression never goes below, if there is one for all indices."""
    return _bound(linear(x), {}, lowest=True) if kind_of(x) == "int" else None


# ---- meaning and text ----------------------------------------------------------------------------------------------


def evaluate(x: Expr, values: Mapping[str, int], load: Callable[[str, tuple[int, ...]], Any]) -> Any:
    """The value for numbers of the indices and sizes. load(tensor, indices): an element of a run-time tensor."""
    match x:
        case Const(value=value):
            return value
        case Index(name=name) | Size(name=name):
            return values[name]
        case Load(tensor=tensor, at=at):
            return load(tensor, tuple(int(evaluate(a, values, load)) for a in at))
        case Linear(terms=terms, const=const):
            return const + sum(factor * int(evaluate(term, values, load)) for term, factor in terms)
        case Test(relation=relation, form=form):
            number = evaluate(form, values, load)
            return {">=": number >= 0, "==": number == 0, "!=": number != 0}[relation]
        case Apply(op="where", args=(condition, a, b)):
            return evaluate(a if evaluate(condition, values, load) else b, values, load)
        case Apply(op=op, args=args):
            return OPS[op][0](*(evaluate(a, values, load) for a in args))


def text(x: Expr) -> str:
    """For people: "k <= q ∧ attention_mask[b, k] != 0"."""
    match x:
        case Const(value=bool()):
            return "true" if x.value else "false"
        case Const(value=value):
            return str(value) if isinstance(value, int) else f"{value:g}"
        case Index(name=name) | Size(name=name):
            return name
        case Load(tensor=tensor, at=at):
            return f"{tensor}[{', '.join(map(text, at))}]"
        case Linear():
            return _sum_text(x)
        case Test(relation=relation, form=form):
            return _test_text(relation, form)
        case Apply(op="and" | "or" as op, args=args):
            return "(" + OPS[op][1].join(map(text, args)) + ")" if op == "or" else OPS[op][1].join(map(text, args))
        case Apply(op=op, args=args):
            return OPS[op][1].format(*map(text, args))


def _test_text(relation: str, form: Linear) -> str:
    """Negative terms go to the other side: q - k >= 0 is printed as k <= q."""
    left = Linear(tuple((t, -c) for t, c in form.terms if c < 0), -form.const if form.const < 0 else 0)
    right = Linear(tuple((t, c) for t, c in form.terms if c > 0), form.const if form.const > 0 else 0)
    if relation != ">=":
        return f"{_sum_text(right)} {'=' if relation == '==' else '≠'} {_sum_text(left)}"
    return f"{_sum_text(left)} <= {_sum_text(right)}"


def _sum_text(form: Linear) -> str:
    parts = [text(t) if c == 1 else f"{c}·{text(t)}" for t, c in form.terms]
    parts += [str(form.const)] if form.const or not parts else []
    return " + ".join(parts)
