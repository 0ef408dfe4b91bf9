"""Mask kinds of an index expression: each part of the conjunction is one kind, or the mask stays dense.

Nothing is guessed: a kind is taken only if the expression is exactly it. A part without a kind stays a formula.
"""

from __future__ import annotations

from collections.abc import Callable

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Test
from attn_compiler.spec import masks
from attn_compiler.spec.masks import MaskKind

B, H, Q, K = map(Index, "bhqk")


def conjuncts(x: Expr) -> tuple[Expr, ...]:
    """Return the parts of a conjunction; none for a mask that allows every pair."""
    if x == ix.TRUE:
        return ()
    return x.args if isinstance(x, Apply) and x.op == "and" else (x,)


def exact(condition: Expr) -> list[Expr]:
    """The parts of a conjunction that no rounding can change."""
    return [part for part in conjuncts(condition) if ix.is_exact(part)]


def recognise(x: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> tuple[MaskKind, ...]:
    """The kinds whose conjunction is the expression. seqlen_q, seqlen_kv: the sizes of the scores."""
    kinds = _joined([_kind(part, seqlen_q, seqlen_kv) for part in conjuncts(x)])
    return tuple(sorted(kinds, key=lambda kind: masks.KINDS.index(type(kind))))


def _kind(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> MaskKind:
    for recogniser in RECOGNISERS:
        found = recogniser(part, seqlen_q, seqlen_kv)
        if found is not None:
            return found
    return masks.Formula(condition=part)


# ---- bounds -------------------------------------------------------------------------------------------------------


def _without(form: Linear, *indices: tuple[Index, int]) -> Linear | None:
    """Return a form without these indices; None if their factors differ, or if a query, key or head is left."""
    factors = dict(form.terms)
    for index, factor in indices:
        if factors.get(index) != factor:
            return None
        form = ix.combine(form, ix.linear(index), -factor)
    return None if ix.mentions(form, Q, K, H) else form


def _plain(form: Linear) -> Expr:
    return ix.add(form, ix.ZERO)


def _causal(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> MaskKind | None:
    """Recognise k <= q + r."""
    if not isinstance(part, Test) or part.relation != ">=":
        return None
    rest = _without(part.form, (K, -1), (Q, 1))
    if rest is None:
        return None
    if rest == Linear(()):
        return masks.Causal()
    if rest == ix.combine(seqlen_kv, seqlen_q, -1):
        return masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT)
    return masks.CausalFrom(offset=_plain(rest))


def _window(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> MaskKind | None:
    """Recognise k >= q - w."""
    if not isinstance(part, Test) or part.relation != ">=":
        return None
    rest = _without(part.form, (K, 1), (Q, -1))
    if rest is None or rest.terms or rest.const < 0:
        return None
    return masks.SlidingWindow(left=rest.const, right=None)


def _band(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> MaskKind | None:
    """Recognise |q - k| <= w."""
    if not isinstance(part, Test) or part.relation != ">=" or len(part.form.terms) != 1:
        return None
    (term, factor), width = part.form.terms[0], part.form.const
    apart = {Linear(((K, -1), (Q, 1))), Linear(((K, 1), (Q, -1)))}
    if factor != -1 or not isinstance(term, Apply) or term.op != "abs" or term.args[0] not in apart or width < 0:
        return None
    return masks.SlidingWindow(left=width, right=width)


def _key_bound(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> MaskKind | None:
    """Recognise k <= r, or k >= -r."""
    if not isinstance(part, Test) or part.relation != ">=":
        return None
    last = _without(part.form, (K, -1))
    if last is not None:
        return masks.KeyBound(side="last", bound=_plain(last))
    first = _without(part.form, (K, 1))
    return None if first is None else masks.KeyBound(side="first", bound=_plain(ix.combine(Linear(()), first, -1)))


# ---- run-time tensors ---------------------------------------------------------------------------------------------


def _key_padding(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> MaskKind | None:
    """Recognise any condition on a tensor's element for the key: attention_mask[b, k] ≠ 0, or token_type_ids[b, k] = 1."""
    reads_keys = any(ix.mentions(load, K) for load in ix.loads(part))
    return masks.KeyPadding(condition=part) if reads_keys and not ix.mentions(part, Q, H) else None


def document(part: Expr) -> masks.Document | None:
    """Recognise f[b, q] = f[b, k], where f is read from tensors."""
    for query, key in _equal_sides(part):
        if not ix.mentions(key, Q, H) and ix.substitute(key, K, Q) == query and any(ix.loads(key)):
            return masks.Document(of_key=key)
    return None


def _equal_sides(part: Expr) -> tuple[tuple[Expr, Expr], ...]:
    """Return (x, y) and (y, x) for x = y, an equation of two terms."""
    if isinstance(part, Apply) and part.op == "eq":
        a, b = part.args
    elif isinstance(part, Test) and part.relation == "==" and part.form.const == 0 and len(part.form.terms) == 2:
        (a, x), (b, y) = part.form.terms
        if x != -y:
            return ()
    else:
        return ()
    return ((a, b), (b, a))


def _chunked(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> MaskKind | None:
    """Recognise (q - s) // c = (k - s) // c."""
    for query, key in _equal_sides(part):
        if not isinstance(key, Apply) or key.op != "floordiv" or ix.substitute(key, K, Q) != query:
            continue
        position, size = key.args
        start = _without(ix.linear(position), (K, 1)) if ix.kind_of(position) == "int" else None
        if start is not None and isinstance(size, Const) and isinstance(size.value, int) and size.value > 0:
            return masks.Chunked(size=size.value, start=_plain(ix.combine(Linear(()), start, -1)))
    return None


# ---- alternatives -------------------------------------------------------------------------------------------------


def _prefix(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> MaskKind | None:
    """Recognise k <= q ∨ k < r."""
    if not isinstance(part, Apply) or part.op != "or" or len(part.args) != 2:
        return None
    kinds = [_kind(alternative, seqlen_q, seqlen_kv) for alternative in part.args]
    bounds = [kind.bound for kind in kinds if isinstance(kind, masks.KeyBound) and kind.side == "last"]
    if masks.Causal() not in kinds or not bounds:
        return None
    return masks.Prefix(length=ix.add(bounds[0], ix.ONE))


def _any_of(part: Expr, seqlen_q: Linear, seqlen_kv: Linear) -> MaskKind | None:
    """Recognise alternatives of which at least one is more than a formula: causal ∨ the same image block."""
    if not isinstance(part, Apply) or part.op != "or" or _is_at_most(part):
        return None
    kinds = [recognise(alternative, seqlen_q, seqlen_kv) for alternative in part.args]
    if all(isinstance(kind, masks.Formula) for alternative in kinds for kind in alternative):
        return None
    return masks.AnyOf(alternatives=tuple(sorted(kinds, key=lambda one: masks.KINDS.index(type(one[0])))))


def _is_at_most(part: Apply) -> bool:
    """True if the alternatives are `x < y ∨ x = y` of floats: one comparison, and no document."""
    ops = {x.op: x.args for x in part.args if isinstance(x, Apply)}
    return len(part.args) == 2 and "lt" in ops and set(ops["lt"]) == set(ops.get("eq", ()))


def _joined(kinds: list[MaskKind]) -> list[MaskKind]:
    """Merge a limit of positions back and one of positions ahead into one window."""
    left = [k for k in kinds if isinstance(k, masks.SlidingWindow) and k.right is None]
    right = [(k, n) for k in kinds if (n := _positions_ahead(k)) is not None]
    if len(left) == 1 and len(right) == 1:
        rest = [k for k in kinds if k not in (left[0], right[0][0])]
        return [*rest, masks.SlidingWindow(left=left[0].left, right=right[0][1])]
    return kinds


def _positions_ahead(kind: MaskKind) -> int | None:
    if isinstance(kind, masks.CausalFrom) and isinstance(kind.offset, Const) and isinstance(kind.offset.value, int):
        return kind.offset.value if kind.offset.value > 0 else None
    return None


#: A new kind: one recogniser here, its class in mask_kinds.py, its test. The first that knows a part names it
RECOGNISERS: tuple[Callable[[Expr, Linear, Linear], MaskKind | None], ...] = (
    _causal,
    _window,
    _band,
    _key_bound,
    _chunked,
    lambda part, *_: document(part),
    _prefix,
    _key_padding,
    _any_of,
)


def at_most(x: Expr) -> Expr:
    """Return a condition that x implies, and that loads no element per query and key."""
    if load_of_pairs(x) is None:
        return x
    match x:
        case Apply(op="and" | "or" as op, args=args):
            return ix.apply(op, *map(at_most, args))
        case Apply(op="where", args=(condition, a, b)) if load_of_pairs(condition) is None:
            return ix.where(condition, at_most(a), at_most(b))
    return ix.TRUE


def load_of_pairs(x: Expr) -> Load | None:
    """Return the first load in x of an element for each pair of query and key, or None."""
    return next((load for load in ix.loads(x) if all(ix.mentions(load, index) for index in (Q, K))), None)
