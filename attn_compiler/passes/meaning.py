"""What the mask of a site is, proved: its tensors read as one condition over (b, h, q, k), and that as kinds."""

from __future__ import annotations

from dataclasses import dataclass

from attn_compiler import index_expr as ix
from attn_compiler import masks
from attn_compiler.index_expr import Expr, Index, Linear
from attn_compiler.masks import ProvedKind
from attn_compiler.passes import axes, kinds, reading
from attn_compiler.passes.axes import Dim
from attn_compiler.passes.reading import Reader, Unreadable
from attn_compiler.passes.site import Match, Term


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """condition: when a pair is allowed, None if that could not be read; then `reason` says why. kinds: the same in words."""

    condition: Expr | None = None
    kinds: tuple[ProvedKind, ...] = ()
    reason: str | None = None

    @property
    def is_everything(self) -> bool:
        return self.condition == ix.TRUE

    @property
    def is_causal_only(self) -> bool:
        return self.condition is not None and len(self.kinds) == 1 and isinstance(self.kinds[0], masks.Causal)

    @property
    def words(self) -> str:
        return " ∧ ".join(kind.words for kind in self.kinds) or "true everywhere"


def of(match: Match, reader: Reader) -> Meaning:
    """Read the mask of a match. Reading a mask never fails: what can't be read comes back with its reason."""
    try:
        condition = ix.apply("and", *(_condition(match, term, reader) for term in (*match.additive, *match.allowed)))
    except Unreadable as unreadable:
        return Meaning(reason=str(unreadable))
    seqlen_q, seqlen_kv = _length(match.query), _length(match.key)
    if seqlen_q is None or seqlen_kv is None:
        return Meaning(reason="a sequence length is no plain size")
    whole = next((load for load in ix.loads(condition) if all(ix.mentions(load, i) for i in (kinds.Q, kinds.K))), None)
    if whole is not None:
        return Meaning(
            reason=f"{whole.tensor} holds an element for each query and key, and how it was made is not in the graph"
        )
    condition = ix.decide(condition, {"q": _last(seqlen_q), "k": _last(seqlen_kv)})
    return Meaning(condition=condition, kinds=kinds.recognise(condition, seqlen_q, seqlen_kv))


def _length(dim: Dim) -> Linear | None:
    expr = reading.size(axes.dim_size(dim))
    return None if expr is None else ix.linear(expr)


def _last(length: Linear) -> Linear:
    return ix.combine(length, Linear((), 1), -1)


def _condition(match: Match, term: Term, reader: Reader) -> Expr:
    node = term.operand.node
    at = tuple(_index(match, dim) for dim in term.operand.dims)
    element = reader.read(node, at)
    if ix.kind_of(element) == "bool":
        return ix.invert(element) if term.inverted else element
    if term.weight <= 0:
        raise Unreadable(f"{node.name} is added with the weight {term.weight:g}")
    condition = kinds.condition_of(element, term.weight)
    if condition is None:
        raise Unreadable(f"{node.name} adds more than masking: {_shortened(ix.text(element))}")
    return condition


def _index(match: Match, dim: Dim) -> Expr:
    """The score's index that runs along one dimension of a mask."""
    atoms = axes.resolve(dim)
    if all(atom.size == axes.ONE for atom in atoms):
        return ix.ZERO
    for name, group in (("b", match.batch), ("h", match.heads), ("q", match.query), ("k", match.key)):
        if atoms == axes.resolve(group):
            return Index(name)
    raise Unreadable("a dimension of the mask is a part of the batch or of the heads")


def _shortened(text: str, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
