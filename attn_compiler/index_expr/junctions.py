"""What a conjunction or a disjunction keeps of its parts: nothing that follows from the others."""

from __future__ import annotations

from collections.abc import Iterable

from attn_compiler.index_expr.nodes import Apply, Expr, Linear, Test

OTHER = {"and": "or", "or": "and"}


def strongest(op: str, parts: Iterable[Expr]) -> list[Expr]:
    """Of bounds on the same form, the one that decides: k <= q ∧ k <= q + 3 is k <= q."""
    bounds: dict[tuple[tuple[Expr, int], ...], int] = {}
    rest = []
    for part in parts:
        if isinstance(part, Test) and part.relation == ">=":
            terms, const = part.form.terms, part.form.const
            choose = min if op == "and" else max
            bounds[terms] = choose(bounds.get(terms, const), const)
        else:
            rest.append(part)
    return rest + [Test(">=", Linear(terms, const)) for terms, const in bounds.items()]


def without_implied(op: str, parts: list[Expr]) -> list[Expr]:
    """a ∨ (a ∧ b) is a, and a ∧ (a ∨ b) is a."""

    def is_implied(part: Expr) -> bool:
        return isinstance(part, Apply) and is_other(op, part) and any(arg in parts for arg in part.args)

    return [part for part in parts if not is_implied(part)]


def is_other(op: str, part: Expr) -> bool:
    """Whether a part of a conjunction is a disjunction, or one of a disjunction is a conjunction."""
    return isinstance(part, Apply) and part.op == OTHER[op]


def joined(op: str, part: Expr) -> tuple[Expr, ...]:
    """What a part of a conjunction is a disjunction of, or the other way round; of one only, if it is none."""
    return part.args if isinstance(part, Apply) and is_other(op, part) else (part,)


def in_each(op: str, parts: list[Expr]) -> list[Expr]:
    """What all parts have in them: (a ∧ b) ∨ (a ∧ c) is a ∧ (b ∨ c)."""
    if len(parts) < 2:
        return []
    first, *rest = (joined(op, part) for part in parts)
    return [x for x in first if all(x in other for other in rest)]
