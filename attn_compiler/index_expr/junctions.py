"""Simplification of conjunctions and disjunctions: no part follows from the others."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import NamedTuple

from attn_compiler.index_expr.nodes import Apply, Expr, Linear, Test
from attn_compiler.index_expr.placing import place

OTHER = {"and": "or", "or": "and"}


_Terms = tuple[tuple[Expr, int], ...]


def strongest(op: str, parts: Iterable[Expr]) -> list[Expr]:
    """Keep the deciding bound on each form: k <= q ∧ k <= q + 3 is k <= q. A single value beside a bound moves it, or follows from it: k <
    q ∨ k = q is k <= q, and k <= q ∧ k ≠ q is k < q."""
    bounds: dict[_Terms, int] = {}
    rest: list[Expr] = []
    for part in parts:
        if isinstance(part, Test) and part.relation == ">=":
            terms, const = part.form.terms, part.form.const
            choose = min if op == "and" else max
            bounds[terms] = choose(bounds.get(terms, const), const)
        else:
            rest.append(part)
    kept = [part for part in rest if not (bounds and _is_absorbed(op, part, bounds))]
    return kept + [Test(">=", Linear(terms, const)) for terms, const in bounds.items()]


def _is_absorbed(op: str, part: Expr, bounds: dict[_Terms, int]) -> bool:
    """Return True if bounds make a (dis)equality redundant. A bound next to its value moves to take it in: k < q ∨ k = q is k <= q."""
    if not isinstance(part, Test) or part.relation != {"or": "==", "and": "!="}[op]:
        return False
    for form in (part.form, _negated(part.form)):
        if form.terms not in bounds:
            continue
        # The bound says terms >= -const, and the value is -form.const.
        least, value = -bounds[form.terms], -form.const
        inside = value >= least if op == "or" else value < least
        if inside:
            return True
        if value == (least - 1 if op == "or" else least):
            bounds[form.terms] += 1 if op == "or" else -1
            return True
    return False


def _negated(form: Linear) -> Linear:
    return Linear(tuple((term, -factor) for term, factor in form.terms), -form.const)


def without_implied(op: str, parts: list[Expr]) -> list[Expr]:
    """Absorb parts: a ∨ (a ∧ b) is a, and a ∧ (a ∨ b) is a."""
    known = {part.facts.digest for part in parts}

    def is_implied(part: Expr) -> bool:
        return is_other(op, part) and not known.isdisjoint([arg.facts.digest for arg in joined(op, part)])

    return [part for part in parts if not is_implied(part)]


def is_other(op: str, part: Expr) -> bool:
    """Return True if a part of a conjunction is a disjunction, or a part of a disjunction is a conjunction."""
    return isinstance(part, Apply) and part.op == OTHER[op]


def joined(op: str, part: Expr) -> tuple[Expr, ...]:
    """Return the parts of the inner junction of the other kind; the part alone if it is none."""
    return part.args if isinstance(part, Apply) and is_other(op, part) else (part,)


def split(op: str, x: Expr) -> tuple[Expr, ...]:
    """Return the parts of a junction of this kind; x alone if it is none."""
    return x.args if isinstance(x, Apply) and x.op == op else (x,)


def in_each(op: str, parts: list[Expr]) -> list[Expr]:
    """Return the common factors of all parts: (a ∧ b) ∨ (a ∧ c) is a ∧ (b ∨ c)."""
    if len(parts) < 2:
        return []
    first, *rest = parts
    common = {x.facts.digest for x in joined(op, first)}
    for part in rest:
        common &= {x.facts.digest for x in joined(op, part)}
        if not common:
            return []
    return [x for x in joined(op, first) if x.facts.digest in common]


# ---- digests of a junction ----------------------------------------------------------------------------------------


class KnownParts(NamedTuple):
    """Digests of a junction's parts, to compare further parts with all of them at once.

    parts: themselves. settled: the parts that are no junctions, and their negations. leaves: of the junctions among them. directions: the
    forms with bounds. points: the forms with an equality or a disequality.
    """

    parts: frozenset[bytes]
    settled: frozenset[bytes]
    leaves: frozenset[bytes]
    directions: frozenset[bytes]
    points: frozenset[bytes]


def known(whole: Apply, invert: Callable[[Expr], Expr]) -> KnownParts:
    """Return the digests of a junction, computed once."""
    if "junction" not in whole.remembered:
        whole.remembered["junction"] = _known(whole.op, whole.args, invert)
    found: KnownParts = whole.remembered["junction"]
    return found


def _known(op: str, parts: Iterable[Expr], invert: Callable[[Expr], Expr]) -> KnownParts:
    others = [part for part in parts if is_other(op, part)]
    atoms = [part for part in parts if not is_other(op, part)]
    return KnownParts(
        parts=frozenset([part.facts.digest for part in parts]),
        settled=frozenset([x.facts.digest for atom in atoms for x in (atom, invert(atom))]),
        leaves=frozenset().union(*map(leaves, others)),
        directions=frozenset([_direction(x.form) for x in atoms if isinstance(x, Test) and x.relation == ">="]),
        points=frozenset(
            [
                _direction(form)
                for x in atoms
                if isinstance(x, Test) and x.relation != ">="
                for form in (x.form, _negated(x.form))
            ]
        ),
    )


def with_parts_apart(whole: Apply, more: Iterable[Expr], invert: Callable[[Expr], Expr]) -> Expr | None:
    """Add parts to a junction if they are unrelated to its own and each other; None if they may be related. A loop may build a junction
    part by part: a new part then does not cost a walk through all earlier ones."""
    before = known(whole, invert)
    new = [part for part in more if part.facts.digest not in before.parts]
    if not new:
        return whole
    together = joined_apart(whole.op, before, new, invert)
    if together is None:
        return None
    parts = list(whole.args)
    for part in new:
        bisect.insort(parts, part, key=place)
    made = Apply(whole.op, tuple(parts))
    made.remembered["junction"] = together
    return made


def joined_apart(op: str, whole: KnownParts, new: list[Expr], invert: Callable[[Expr], Expr]) -> KnownParts | None:
    """Return the digests of a junction with new parts; None if a part follows from others, contradicts or bounds the same form. No part is
    common to all then, as none was before."""
    own = [_known(op, (part,), invert) for part in new]
    for more in own:
        if not (whole.settled.isdisjoint(more.settled) and whole.directions.isdisjoint(more.directions | more.points)):
            return None
        if not whole.points.isdisjoint(more.directions):
            return None
        if not (whole.settled.isdisjoint(more.leaves) and whole.leaves.isdisjoint(more.settled)):
            return None
        whole = KnownParts(*(mine | theirs for mine, theirs in zip(whole, more, strict=True)))
    return whole


def leaves(x: Expr) -> frozenset[bytes]:
    """Return the digests of the parts of nested junctions that are no junctions."""
    if not isinstance(x, Apply) or x.op not in OTHER:
        return frozenset((x.facts.digest,))
    if "leaves" not in x.remembered:
        x.remembered["leaves"] = frozenset().union(*map(leaves, x.args))
    found: frozenset[bytes] = x.remembered["leaves"]
    return found


def _direction(form: Linear) -> bytes:
    """Return a digest that is equal for forms that differ in their constant only."""
    if "direction" not in form.remembered:
        form.remembered["direction"] = Linear(form.terms).facts.digest
    found: bytes = form.remembered["direction"]
    return found
