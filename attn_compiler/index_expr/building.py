"""Building expressions in normal form: numbers folded, whole-number sums linear, tests against zero, junctions flat and sorted."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping

from attn_compiler.index_expr import junctions
from attn_compiler.index_expr.folding import EXACT_IN_EVERY_DTYPE, choice_of_numbers, has_value, may_hold, pinned_by
from attn_compiler.index_expr.linear_forms import combine, linear, plain
from attn_compiler.index_expr.looking import ordered, parts
from attn_compiler.index_expr.nodes import (
    FALSE,
    ONE,
    OPS,
    TRUE,
    ZERO,
    Apply,
    Const,
    Expr,
    Index,
    Linear,
    Load,
    Test,
    kind_of,
)
from attn_compiler.index_expr.placing import place

#: Floats up to here are folded like integers: none of their sums and products is rounded
_LARGEST_WHOLE = 2.0**24

#: larger than every 64-bit integer, rounded up too
_BEYOND_WHOLE = 2.0**65

#: size limit of expressions that a choice simplifies by its condition, since each choice around it does so again
_LOOKED_INTO = 256


def add(a: Expr, b: Expr, factor: int = 1) -> Expr:
    """a + factor · b."""
    if kind_of(a) != "float" and kind_of(b) != "float":
        return plain(combine(linear(as_int(a)), linear(as_int(b)), factor))
    if factor != 1:
        b = mul(b, Const(factor))
    if isinstance(a, Const) and a.value == 0:
        return as_float(b)
    if isinstance(b, Const) and b.value == 0:
        return as_float(a)
    return _lifted("add", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    """a · b."""
    if isinstance(a, Const) and not isinstance(b, Const):
        a, b = b, a
    if kind_of(a) != "float" and kind_of(b) != "float":
        a, b = as_int(a), as_int(b)
        if isinstance(b, Const):
            return plain(combine(Linear(()), linear(a), int(b.value)))
        return _lifted("mul", a, b)
    if isinstance(b, Const) and b.value == 1:
        return as_float(a)
    return _lifted("mul", a, b)


def as_int(x: Expr) -> Expr:
    """Return a truth value as 0 or 1, and integers unchanged."""
    if isinstance(x, Const) and isinstance(x.value, bool):
        return Const(int(x.value))
    return where(x, ONE, ZERO) if kind_of(x) == "bool" else x


def as_float(x: Expr) -> Expr:
    """Return the same number as a float."""
    return x if kind_of(x) == "float" else apply("float", x)


def as_bool(x: Expr) -> Expr:
    """Return x != 0."""
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
    """Compare a linear form with zero, in normal form. Coefficients have no common divisor; the leading one of an equation is positive."""
    if not form.terms:
        return Const({">=": form.const >= 0, "==": form.const == 0, "!=": form.const != 0}[relation])
    divisor = math.gcd(*(factor for _, factor in form.terms))
    if relation != ">=" and form.const % divisor:
        return Const(relation == "!=")
    # 2q - 2k + 1 >= 0 is q - k >= 0: over integers the remainder of the division never counts.
    form = Linear(tuple((term, factor // divisor) for term, factor in form.terms), form.const // divisor)
    if relation != ">=" and form.terms[0][1] < 0:
        form = combine(Linear(()), form, -1)
    inside = _test_of_choice(relation, form) or _test_of_product(relation, form)
    return inside if inside is not None else Test(relation, form)


def _test_of_choice(relation: str, form: Linear) -> Expr | None:
    """Split a test on a single `c ? a : b` of numbers into a test of each."""
    if len(form.terms) != 1:
        return None
    (term, factor), const = form.terms[0], form.const
    if not isinstance(term, Apply) or term.op != "where" or not all(isinstance(v, Const) for v in term.args[1:]):
        return None
    yes, no = (test(relation, Linear((), factor * int(v.value) + const)) for v in term.args[1:])  # type: ignore[union-attr]
    return where(term.args[0], yes, no)


def _test_of_product(relation: str, form: Linear) -> Expr | None:
    """Split a test of a product against zero into one of each factor."""
    if relation == ">=" or form.const != 0 or len(form.terms) != 1:
        return None
    ((term, _),) = form.terms
    if not isinstance(term, Apply) or term.op != "mul":
        return None
    return apply("and" if relation == "!=" else "or", *(test(relation, linear(a)) for a in term.args))


def invert(x: Expr) -> Expr:
    """Return not x, with the negation carried inwards."""
    if "inverse" not in x.remembered:
        x.remembered["inverse"] = _inverse(x)
    found: Expr = x.remembered["inverse"]
    return found


def _inverse(x: Expr) -> Expr:
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
    """Return a where the condition holds, else b."""
    kinds = {kind_of(a), kind_of(b)}
    if len(kinds) > 1:
        convert = as_float if "float" in kinds else as_int
        return where(condition, convert(a), convert(b))
    if isinstance(condition, Const):
        return a if condition.value else b
    if a == b:
        return a
    if kinds == {"bool"}:
        return _where_bools(condition, a, b)
    a, b = _settled(a, condition, holds=True), _settled(b, condition, holds=False)
    if a == b:
        return a
    if isinstance(b, Apply) and b.op == "where" and a in b.args[1:]:
        inner, other = (b.args[0], b.args[2]) if b.args[1] == a else (invert(b.args[0]), b.args[1])
        return where(apply("or", condition, inner), a, other)
    if isinstance(a, Apply) and a.op == "where" and b in a.args[1:]:
        inner, other = (a.args[0], a.args[1]) if a.args[2] == b else (invert(a.args[0]), a.args[2])
        return where(apply("and", condition, inner), other, b)
    pinned = pinned_by(condition, Index) if max(a.facts.size, b.facts.size) <= _LOOKED_INTO else None
    if pinned is not None and substitute(b, *pinned) == substitute(a, *pinned):
        return b
    return Apply("where", (condition, a, b))


def _settled(x: Expr, condition: Expr, *, holds: bool) -> Expr:
    """Simplify x by a condition that holds, or fails: c ? 0 : (¬c ? -100 : x) is c ? 0 : -100, and m = 1 ? m : 0 is m = 1 ? 1 : 0."""
    inverse = invert(condition)
    while isinstance(x, Apply) and x.op == "where" and x.args[0] in (condition, inverse):
        x = x.args[1 if (x.args[0] == condition) == holds else 2]
    pinned = pinned_by(condition if holds else inverse, Load) if x.facts.size <= _LOOKED_INTO else None
    return x if pinned is None else substitute(x, *pinned)


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


def _lifted(op: str, a: Expr, b: Expr) -> Expr:
    """Apply a float op; distribute it over a choice between numbers, or over two choices by the same condition."""
    if isinstance(a, Const) and isinstance(b, Const):
        return Const(OPS[op][0](a.value, b.value))
    choices = choice_of_numbers(a), choice_of_numbers(b)
    condition = next((choice[0] for choice in choices if choice is not None), None)
    if condition is not None:
        (yes, no), (other_yes, other_no) = (
            _under(condition, x, choice) for x, choice in zip((a, b), choices, strict=True)
        )
        if all(isinstance(x, Const) for x in (yes, no, other_yes, other_no)):
            return where(condition, _lifted(op, yes, other_yes), _lifted(op, no, other_no))
    whole, other = whole_of(a), whole_of(b)
    if whole is not None and other is not None and "float" in (kind_of(a), kind_of(b)):
        return as_float(add(whole, other) if op == "add" else mul(whole, other))
    return Apply(op, (a, b))


def _under(condition: Expr, x: Expr, choice: tuple[Expr, Expr, Expr] | None) -> tuple[Expr, Expr]:
    """Return x where the condition holds, and where it fails: both x, unless x is a choice by that condition."""
    if choice is None or choice[0] not in (condition, invert(condition)):
        return x, x
    return choice[1:] if choice[0] == condition else (choice[2], choice[1])


def whole_of(x: Expr) -> Expr | None:
    """Return the integer that x surely equals; None if it may not be one."""
    match x:
        case Apply(op="float", args=(inner,)) if kind_of(inner) == "int":
            return inner
        case Const(value=float() as value) if value.is_integer() and abs(value) <= _LARGEST_WHOLE:
            return Const(int(value))
        case _:
            return None if kind_of(x) == "float" else as_int(x)


def apply(op: str, *args: Expr) -> Expr:
    """Apply an op of OPS, in normal form."""
    if op in ("and", "or"):
        return _junction(op, args)
    if op == "not":
        return invert(args[0])
    if op == "where":
        return where(*args)
    if op in ("abs", "min", "max", "floordiv", "mod"):
        # Arguments are of one kind: all integers, or all floats.
        args = tuple(map(as_float if any(kind_of(a) == "float" for a in args) else as_int, args))
    values = [a.value for a in args if isinstance(a, Const)]
    if len(values) == len(args) and has_value(op, values):
        return Const(OPS[op][0](*values))
    if op == "xor":
        return _xor(*args)
    if op == "eq":
        return _equal_floats(*args)
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


def _equal_floats(a: Expr, b: Expr) -> Expr:
    """Return a = b.

    A difference from a number is zero just where its sides are equal: no dtype rounds one of numbers about 1 to zero. Integers have 64
    bits, so in no dtype do they equal a number far beyond that, such as float32's lowest.
    """
    match a, b:
        case Apply(op="add", args=(Const(value=c), x) | (x, Const(value=c))), Const(value=0) if 1 <= abs(c) < math.inf:
            return _equal_floats(x, Const(-float(c)))
        case Apply(op="mul", args=(x, Const(value=-1))), Const(value=c):
            return _equal_floats(x, Const(-float(c)))
        case Apply(op="rounded", args=(x,)), Const(value=c) if kind_of(x) == "int" and abs(c) < EXACT_IN_EVERY_DTYPE:
            return _equal_floats(apply("float", x), b)
        case Apply(op="rounded" | "float", args=(x,)), Const(value=c) if (
            kind_of(x) == "int" and _BEYOND_WHOLE < abs(c) < math.inf
        ):
            return FALSE
        case _:
            whole, other = whole_of(a), whole_of(b)
            if whole is None or other is None:
                return Apply("eq", (a, b))
            return test("==", combine(linear(whole), linear(other), -1))


def _xor(a: Expr, b: Expr) -> Expr:
    if isinstance(a, Const):
        a, b = b, a
    if isinstance(b, Const):
        return invert(a) if b.value else a
    return FALSE if a == b else Apply("xor", (a, b))


def _junction(op: str, args: tuple[Expr, ...]) -> Expr:
    neutral, absorbing = (TRUE, FALSE) if op == "and" else (FALSE, TRUE)
    largest = max(args, key=lambda arg: len(junctions.split(op, arg)), default=neutral)
    flat: dict[Expr, None] = {}
    for arg in args:
        if arg is not largest:
            flat |= dict.fromkeys(junctions.split(op, arg))
    if absorbing in flat or largest == absorbing:
        return absorbing
    flat.pop(neutral, None)
    if isinstance(largest, Apply) and largest.op == op:
        joined = junctions.with_parts_apart(largest, flat, invert)
        if joined is not None:
            return joined
    elif largest == neutral:
        return _strongest(op, flat)
    return _strongest(op, dict.fromkeys(junctions.split(op, largest)) | flat)


def _strongest(op: str, flat: Iterable[Expr]) -> Expr:
    """Join any parts, comparing each with all others. None is a constant, or a junction of the same kind."""
    neutral, absorbing = (TRUE, FALSE) if op == "and" else (FALSE, TRUE)
    kept = junctions.without_implied(op, junctions.strongest(op, flat))
    atoms = [part for part in kept if not junctions.is_other(op, part)]
    known = {part.facts.digest: neutral for part in atoms}
    known |= {invert(part).facts.digest: absorbing for part in atoms}
    if any(known[part.facts.digest] == absorbing for part in atoms):
        return absorbing
    reduced = [_knowing(known, part) if junctions.is_other(op, part) else part for part in kept]
    if reduced != kept:
        return _junction(op, tuple(reduced))
    common = junctions.in_each(op, kept)
    if common:
        return apply(junctions.OTHER[op], *common, apply(op, *(_without(common, op, part) for part in kept)))
    placed = sorted(kept, key=place)
    return neutral if not placed else placed[0] if len(placed) == 1 else Apply(op, tuple(placed))


def _without(common: list[Expr], op: str, part: Expr) -> Expr:
    return apply(junctions.OTHER[op], *(x for x in junctions.joined(op, part) if x not in common))


def _knowing(known: Mapping[bytes, Expr], x: Expr) -> Expr:
    """Simplify a part of a junction by its other parts: a ∧ (¬a ∨ b) is a ∧ b. known: the truth value that the other parts settle, by
    digest."""
    if x.facts.digest in known:
        return known[x.facts.digest]
    if not isinstance(x, Apply) or known.keys().isdisjoint(junctions.leaves(x)):
        return x
    changed = tuple([_knowing(known, part) for part in x.args])
    return x if changed == x.args else apply(x.op, *changed)


def substitute(x: Expr, index: Expr, by: Expr) -> Expr:
    """Replace every occurrence of an index (or of a load) in x, in normal form again."""
    done: dict[Expr, Expr] = {}
    for part in ordered(x, lambda part: parts(part) if may_hold(part, index) else ()):
        done[part] = by if part == index else rebuilt_of(part, done) if may_hold(part, index) else part
    return done[x]


def rebuilt_of(x: Expr, done: Mapping[Expr, Expr]) -> Expr:
    """Rebuild x from the new versions of its direct parts, in normal form again."""
    changed = [done.get(part, part) for part in parts(x)]
    if all(map(operator.is_, changed, parts(x))):
        return x
    match x:
        case Linear(terms=terms, const=const):
            total: Expr = Const(const)
            for new, (_, factor) in zip(changed, terms, strict=True):
                total = add(total, mul(new, Const(factor)))
            return total
        case Test(relation=relation):
            return test(relation, linear(changed[0]))
        case Load(tensor=tensor, kind=kind):
            return Load(tensor, tuple(changed), kind)
        case Apply(op=op):
            return rebuilt(op, tuple(changed))
        case _:
            return x


def rebuilt(op: str, args: tuple[Expr, ...]) -> Expr:
    """Apply an op, with its special builder if it has one."""
    if op == "add":
        return add(args[0], args[1])
    return mul(*args) if op == "mul" else apply(op, *args)
