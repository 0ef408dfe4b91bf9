"""From an index expression to mask kinds: each part of the conjunction is one kind, or the mask stays dense.

Nothing is guessed: a kind is taken only where the expression is literally it. What remains unnamed keeps its formula.
"""

from __future__ import annotations

from collections.abc import Callable

from attn_compiler import index_expr as ix
from attn_compiler import masks
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Test
from attn_compiler.masks import ProvedKind
from attn_compiler.passes.patterns.score_steps import MASKED_BELOW, STILL_MASKED_BELOW

Q, K, B = Index("q"), Index("k"), Index("b")


def condition_of(additive: Expr, weight: float = 1.0) -> Expr | None:
    """When an additive term lets a pair through: x where the term is `x ? 0 : lowest`; None if it does anything else.

    weight: the factor that the term has in the end; above zero.
    """
    match additive:
        case Const(value=value):
            masks_out = value <= MASKED_BELOW and value * weight <= STILL_MASKED_BELOW
            return ix.TRUE if value == 0 else ix.FALSE if masks_out else None
        case Apply(op="where", args=(condition, a, b)):
            yes, no = condition_of(a, weight), condition_of(b, weight)
            return None if yes is None or no is None else ix.where(condition, yes, no)
        case Apply(op="add", args=args):
            parts = [condition_of(a, weight) for a in args]
            return None if any(p is None for p in parts) else ix.apply("and", *(p for p in parts if p is not None))
        case _:
            return None


def conjuncts(x: Expr) -> tuple[Expr, ...]:
    """The parts that must all hold; none for a mask that lets everything through."""
    if x == ix.TRUE:
        return ()
    return x.args if isinstance(x, Apply) and x.op == "and" else (x,)


def recognise(x: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> tuple[ProvedKind, ...]:
    """The kinds whose conjunction is the expression. seqlen_q, seqlen_kv: the sizes of the scores."""
    kinds = _joined([_kind(part, seqlen_q, seqlen_kv) for part in conjuncts(x)])
    return tuple(sorted(kinds, key=lambda kind: masks.PROVED_KINDS.index(type(kind))))


def _kind(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> ProvedKind:
    for recogniser in RECOGNISERS:
        found = recogniser(part, seqlen_q, seqlen_kv)
        if found is not None:
            return found
    return masks.Formula(text=ix.text(part))


def _bound(part: Expr, key_factor: int) -> Linear | None:
    """r of `k <= q + r` (key_factor -1) or of `k >= q - r` (key_factor 1)."""
    if not isinstance(part, Test) or part.relation != ">=":
        return None
    factors = dict(part.form.terms)
    if factors.get(K) != key_factor or factors.get(Q) != -key_factor:
        return None
    rest = ix.combine(part.form, Linear(((K, key_factor),)), -1)
    rest = ix.combine(rest, Linear(((Q, -key_factor),)), -1)
    return None if _mentions_pair(rest) else rest


def _mentions_pair(x: Expr) -> bool:
    return ix.mentions(x, Q) or ix.mentions(x, K)


def _causal(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> ProvedKind | None:
    rest = _bound(part, -1)
    if rest is None:
        return None
    if rest == Linear(()):
        return masks.Causal()
    if rest == ix.combine(seqlen_kv, seqlen_q, -1):
        return masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT)
    if not rest.terms and rest.const > 0:
        return masks.SlidingWindow(left=None, right=rest.const)
    return masks.CausalFrom(offset=ix.text(_plain(rest)))


def _plain(form: Linear) -> Expr:
    return ix.add(form, ix.ZERO)


def _window(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> ProvedKind | None:
    rest = _bound(part, 1)
    if rest is None or rest.terms or rest.const < 0:
        return None
    return masks.SlidingWindow(left=rest.const, right=None)


def _band(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> ProvedKind | None:
    """|q - k| <= w."""
    if not isinstance(part, Test) or part.relation != ">=" or len(part.form.terms) != 1:
        return None
    (term, factor), width = part.form.terms[0], part.form.const
    apart = {Linear(((K, -1), (Q, 1))), Linear(((K, 1), (Q, -1)))}
    if factor != -1 or not isinstance(term, Apply) or term.op != "abs" or term.args[0] not in apart or width < 0:
        return None
    return masks.SlidingWindow(left=width, right=width)


def _key_bound(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> ProvedKind | None:
    """k <= r (or k >= -r) with r read at run time, for a batch row or for all."""
    if not isinstance(part, Test) or part.relation != ">=":
        return None
    factor = dict(part.form.terms).get(K)
    rest = ix.combine(part.form, Linear(((K, factor or 0),)), -1)
    if factor not in (1, -1) or _mentions_pair(rest):
        return None
    side = "last" if factor == -1 else "first"
    bound = rest if factor == -1 else ix.combine(Linear(()), rest, -1)
    return masks.KeyBound(side=side, bound=ix.text(_plain(bound)))


def _key_padding(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> ProvedKind | None:
    """A tensor [b, k] (or [k]) that is nonzero, or true, where a key may be used."""
    loaded, negated = part, False
    if isinstance(loaded, Apply) and loaded.op == "not":
        loaded, negated = loaded.args[0], True
    if (
        isinstance(loaded, Test)
        and loaded.relation in ("!=", "==")
        and loaded.form.const == 0
        and len(loaded.form.terms) == 1
    ):
        negated = loaded.relation == "=="
        loaded = loaded.form.terms[0][0]
    if isinstance(loaded, Load) and loaded.at in ((B, K), (K,), (B, ix.ZERO, ix.ZERO, K), (ix.ZERO, K)):
        return masks.KeyPadding(tensor=loaded.tensor, text=ix.text(part), inverted=negated)
    return None


def _document(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> ProvedKind | None:
    """doc[b, q] = doc[b, k]."""
    if not isinstance(part, Test) or part.relation != "==" or part.form.const != 0 or len(part.form.terms) != 2:
        return None
    (a, x), (b, y) = part.form.terms
    if not isinstance(a, Load) or not isinstance(b, Load) or a.tensor != b.tensor or x != -y or abs(x) != 1:
        return None
    return masks.Document(tensor=a.tensor) if {a.at, b.at} in ({(B, Q), (B, K)}, {(Q,), (K,)}) else None


def _chunked(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> ProvedKind | None:
    """q // c = k // c."""
    if not isinstance(part, Test) or part.relation != "==" or part.form.const != 0 or len(part.form.terms) != 2:
        return None
    (a, x), (b, y) = part.form.terms
    if x != -y or abs(x) != 1 or not all(isinstance(t, Apply) and t.op == "floordiv" for t in (a, b)):
        return None
    (left, size), (right, other) = a.args, b.args  # type: ignore[union-attr]
    same = size == other and isinstance(size, Const) and {left, right} == {Q, K}
    return masks.Chunked(size=int(size.value)) if same and isinstance(size, Const) else None


def _any_of(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> ProvedKind | None:
    if not isinstance(part, Apply) or part.op != "or":
        return None
    kinds = [_joined([_kind(p, seqlen_q, seqlen_kv) for p in conjuncts(alternative)]) for alternative in part.args]
    if any(isinstance(kind, masks.Formula) for kinds_ in kinds for kind in kinds_):
        return None
    return masks.AnyOf(alternatives=tuple(tuple(k) for k in kinds))


def _joined(kinds: list[ProvedKind]) -> list[ProvedKind]:
    """A left and a right bound are one window."""
    left = [k for k in kinds if isinstance(k, masks.SlidingWindow) and k.right is None]
    right = [k for k in kinds if isinstance(k, masks.SlidingWindow) and k.left is None]
    if len(left) == 1 and len(right) == 1:
        rest = [k for k in kinds if k not in (left[0], right[0])]
        return [*rest, masks.SlidingWindow(left=left[0].left, right=right[0].right)]
    return kinds


#: A new kind: one recogniser here, its class in masks.py, its test
RECOGNISERS: tuple[Callable[[Expr, Linear, Linear], ProvedKind | None], ...] = (
    _causal,
    _window,
    _band,
    _key_padding,
    _document,
    _chunked,
    _key_bound,
    _any_of,
)
