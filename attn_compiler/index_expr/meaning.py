"""What an expression is worth for numbers and tensors, and how it is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attn_compiler.index_expr.nodes import OPS, Apply, Const, Expr, Index, Linear, Load, Size, Test


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
