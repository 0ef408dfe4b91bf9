"""When a pair of a query and a key takes part, as one expression over (b, h, q, k): what a drawing is made of."""

from __future__ import annotations

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index
from attn_compiler.spec import masks
from attn_compiler.spec.masks import Alignment, MaskKind

_Q, _K = Index("q"), Index("k")


def condition_of(kind: MaskKind, seqlen_q: int, seqlen_kv: int) -> Expr | None:
    """The same as `kind.mask_mod`; None for a kind that is not known here."""
    match kind:
        case masks.Causal(alignment=alignment):
            shift = 0 if alignment is Alignment.TOP_LEFT else seqlen_kv - seqlen_q
            return _up_to(ix.add(_Q, Const(shift)))
        case masks.CausalFrom(offset=offset):
            return _up_to(ix.add(_Q, offset))
        case masks.SlidingWindow(left=left, right=right):
            first = ix.TRUE if left is None else _from(ix.add(_Q, Const(-left)))
            return ix.apply("and", first, ix.TRUE if right is None else _up_to(ix.add(_Q, Const(right))))
        case masks.Prefix(length=length):
            return ix.apply("or", _up_to(_Q), ix.compare("<", _K, length))
        case masks.KeyPadding(condition=condition) | masks.Formula(condition=condition):
            return condition
        case masks.KeyBound(side=side, bound=bound):
            return _up_to(bound) if side == "last" else _from(bound)
        case masks.Document(of_key=of_key):
            return ix.compare("==", kind.of_query, of_key)
        case masks.Chunked(size=size, start=start):
            of_query, of_key = (ix.apply("floordiv", ix.add(i, start, -1), Const(size)) for i in (_Q, _K))
            return ix.compare("==", of_query, of_key)
        case masks.AnyOf(alternatives=alternatives):
            found = [all_of(kinds, seqlen_q, seqlen_kv) for kinds in alternatives]
            known = [one for one in found if one is not None]
            return ix.apply("or", *known) if len(known) == len(found) else None
    return None


def all_of(kinds: tuple[MaskKind, ...], seqlen_q: int, seqlen_kv: int) -> Expr | None:
    """When all kinds let a pair through; None if one of them is not known here."""
    found = [condition_of(kind, seqlen_q, seqlen_kv) for kind in kinds]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    return ix.apply("and", *known) if known else ix.TRUE


def _up_to(bound: Expr) -> Expr:
    return ix.compare("<=", _K, bound)


def _from(bound: Expr) -> Expr:
    return ix.compare(">=", _K, bound)
