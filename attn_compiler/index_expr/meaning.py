"""Values of an expression on numbers, and its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attn_compiler.index_expr.looking import loads_last
from attn_compiler.index_expr.nodes import OPS, Apply, Const, Expr, Index, Linear, Load, Size, Test


def evaluate(x: Expr, values: Mapping[str, int], load: Callable[[str, tuple[int, ...]], Any]) -> Any:
    """Return the value for numbers of the indices and sizes. load(tensor, indices): an element of a run-time tensor."""
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
        case Apply(op="and" | "or" as op, args=args):
            # One deciding part is enough: loads in the others may be out of bounds.
            decides = op == "or"
            return any(bool(evaluate(a, values, load)) == decides for a in loads_last(args)) == decides
        case Apply(op=op, args=args):
            return OPS[op][0](*(evaluate(a, values, load) for a in args))


# ---- text ---------------------------------------------------------------------------------------------------------

#: operator precedence, loosest first; a part that binds at least as tightly as its place needs no brackets
_OR, _AND, _COMPARISON, _SUM, _PRODUCT, _WHOLE = range(6)


def text(x: Expr, most: int | None = None) -> str:
    """Return text for people: "k <= q ∧ attention_mask[b, k] ≠ 0". most: characters, beyond which it ends in "…"."""
    whole = _text(x, _AND)
    return whole if most is None else shortened(whole, most)


def shortened(words: str, most: int) -> str:
    """Cut words to `most` characters, followed by "…" if any were cut."""
    return words if len(words) <= most else f"{words[:most]}…"


def _text(x: Expr, place: int) -> str:
    """Return the text, in brackets if it binds less tightly than `place`."""
    written, tightness = _written(x)
    return written if tightness >= place else f"({written})"


def _written(x: Expr) -> tuple[str, int]:
    match x:
        case Const(value=value):
            return _number_text(value), _WHOLE if isinstance(value, bool) or value >= 0 else _SUM
        case Index(name=name) | Size(name=name):
            # A size may be a product of symbols.
            return name, _WHOLE if name.replace("_", "").isalnum() else _OR
        case Load(tensor=tensor, at=at):
            return (f"{tensor}[{', '.join(map(text, at))}]" if at else tensor), _WHOLE
        case Linear():
            return _sum_text(x), _SUM
        case Test(relation=relation, form=form):
            return _test_text(relation, form), _COMPARISON
        case Apply(op="and" | "or" as op, args=args):
            tightness = _AND if op == "and" else _OR
            # Brackets around "and" inside "or" too, for readers unsure of their precedence.
            return OPS[op][1].join(_text(a, _COMPARISON) for a in args), tightness
        case Apply(op="not", args=(inner,)):
            return f"¬{_text(inner, _WHOLE)}", _WHOLE
        case Apply(op="abs" | "min" | "max" | "float" | "rounded" | "int" | "log" | "exp" as op, args=args):
            return OPS[op][1].format(*(_text(a, _OR) for a in args)), _WHOLE
        case Apply(op="where", args=(condition, a, b)):
            return OPS["where"][1].format(_text(condition, _AND), _text(a, _SUM), _text(b, _SUM)), _WHOLE
        case Apply(op="eq" | "lt" | "xor" as op, args=args):
            return OPS[op][1].format(*(_text(a, _SUM) for a in args)), _WHOLE
        case Apply(op=op, args=args):
            return OPS[op][1].format(*(_text(a, _PRODUCT) for a in args)), _WHOLE


def _number_text(value: float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else f"{value:g}"


def _test_text(relation: str, form: Linear) -> str:
    """Print negative terms on the other side: q - k >= 0 is k <= q."""
    left = Linear(tuple((t, -c) for t, c in form.terms if c < 0), -form.const if form.const < 0 else 0)
    right = Linear(tuple((t, c) for t, c in form.terms if c > 0), form.const if form.const > 0 else 0)
    if relation != ">=":
        return f"{_sum_text(right)} {'=' if relation == '==' else '≠'} {_sum_text(left)}"
    if not right.terms:
        # The bound stands alone: k <= -3, not k + 3 <= 0.
        left, right = Linear(left.terms), Linear((), right.const - left.const)
    return f"{_sum_text(left)} <= {_sum_text(right)}"


def _sum_text(form: Linear) -> str:
    """Print positive terms first, so that a sum begins with a sign only if all are negative."""
    signed = sorted(form.terms, key=lambda tc: tc[1] < 0)
    parts = [(c, _text(t, _WHOLE) if abs(c) == 1 else f"{abs(c)}·{_text(t, _WHOLE)}") for t, c in signed]
    parts += [(form.const, str(abs(form.const)))] if form.const or not parts else []
    parts.sort(key=lambda part: part[0] < 0)
    first, *rest = parts
    written = f"-{first[1]}" if first[0] < 0 else first[1]
    return written + "".join(f" {'-' if c < 0 else '+'} {t}" for c, t in rest)
