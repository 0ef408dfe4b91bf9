"""Kinds of masks: each allows a set of (query, key) pairs. Pure data, no FX, no CUDA.

A kind has `words` for people and a `condition` for one pair: an index expression over (b, h, q, k), sizes and run-time tensors. Its
`formula`, its drawing, and the intervals and truth values of kernels follow from that. tests/spec/meanings.py writes each condition once
more, by hand: every kernel and every recovery is tested against it.

To add a kind: docs/changes.md. Kernels apply a kind that lets through keys whatever the query is. Any other one needs an interval in
lowerings/shared/parts/intervals.py; until then the model's own tensor, which holds the same mask, is applied. If neither a tensor nor a
flag holds a kind, `check_masks` in lowerings/shared/limits/mask_limits.py refuses it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Size

_Q, _K = Index("q"), Index("k")
#: the numbers of queries and keys, as conditions name them
SEQLEN_Q, SEQLEN_KV = Size("Sq"), Size("Skv")


class _Meaning(Protocol):
    @property
    def condition(self) -> Expr: ...


class _Kind:
    """Base of kinds: properties derived from the condition."""

    __slots__ = ()

    @property
    def formula(self: _Meaning) -> str:
        return ix.text(self.condition)


class Alignment(enum.Enum):
    """The corner of the (Sq, Skv) rectangle where a causal diagonal starts. PyTorch's is_causal is TOP_LEFT."""

    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"


@dataclass(frozen=True, kw_only=True, slots=True)
class Causal(_Kind):
    """Key k is allowed for query q when k <= q (TOP_LEFT) or k <= q + Skv - Sq (BOTTOM_RIGHT)."""

    alignment: Alignment = Alignment.TOP_LEFT

    @property
    def words(self) -> str:
        return "causal" if self.alignment is Alignment.TOP_LEFT else "causal (bottom-right)"

    @property
    def formula(self) -> str:
        return "k <= q" if self.alignment is Alignment.TOP_LEFT else "k <= q + Skv - Sq"

    @property
    def condition(self) -> Expr:
        shifted = _Q if self.alignment is Alignment.TOP_LEFT else ix.add(ix.add(_Q, SEQLEN_KV), SEQLEN_Q, -1)
        return _up_to(shifted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """A tensor operand that broadcasts to (B, Hq, Sq, Skv).

    shape: its own broadcast shape (1 for a broadcast axis). dtype "bool" means True = allowed; a float dtype is added to the scaled scores.
    terms: the number of the model's tensors combined into it.
    """

    shape: tuple[int | str, ...]
    dtype: str
    terms: int = 1

    @property
    def is_bool(self) -> bool:
        return self.dtype == "bool"

    @property
    def words(self) -> str:
        dims = ", ".join(str(d) for d in self.shape)
        what = "dense bool" if self.is_bool else f"dense additive {self.dtype}"
        return f"{what}[{dims}]" + (f" from {self.terms} tensors" if self.terms > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalFrom(_Kind):
    """k <= q + offset. offset: over b, sizes and run-time tensors (a cache's filled length); -1 is strictly causal."""

    offset: Expr

    @property
    def words(self) -> str:
        if self.offset == ix.Const(-1):
            return "strictly causal"
        return f"causal from {ix.text(self.offset)}"

    @property
    def condition(self) -> Expr:
        return _up_to(ix.add(_Q, self.offset))


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow(_Kind):
    """q - left <= k <= q + right; None is no bound on that side."""

    left: int | None
    right: int | None

    @property
    def words(self) -> str:
        sides = [f"{n} {side}" for n, side in ((self.left, "back"), (self.right, "ahead")) if n is not None]
        return f"window ({', '.join(sides)})"

    @property
    def formula(self) -> str:
        low = f"q - {self.left} <= " if self.left is not None else ""
        high = f" <= q + {self.right}" if self.right is not None else ""
        return f"{low}k{high}"

    @property
    def condition(self) -> Expr:
        first = ix.TRUE if self.left is None else _from(ix.add(_Q, Const(-self.left)))
        return ix.apply("and", first, ix.TRUE if self.right is None else _up_to(ix.add(_Q, Const(self.right))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix(_Kind):
    """k < length or k <= q: all queries see the prefix, the rest is causal. length: over b, sizes and run-time tensors."""

    length: Expr

    @property
    def words(self) -> str:
        return f"causal after a prefix of {ix.text(self.length)}"

    @property
    def formula(self) -> str:
        return f"(k < {ix.text(self.length)} ∨ k <= q)"

    @property
    def condition(self) -> Expr:
        return ix.apply("or", _up_to(_Q), ix.compare("<", _K, self.length))


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPadding(_Kind):
    """Key k of batch row b is allowed where the condition over (b, k) holds, for every query and head. Its run-time tensors may leave out
    any keys: at the left, at the right, or between others. KeyBound leaves out one piece."""

    condition: Expr

    @property
    def words(self) -> str:
        loaded, negated = ix.nonzero(self.condition)
        if isinstance(loaded, ix.Load):
            return f"key padding {'¬' * negated}{ix.text(loaded)}"
        return f"keys where {self.formula}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyBound(_Kind):
    """k <= bound ("last") or k >= bound ("first"); bound: over b, sizes and run-time tensors.

    The left-out keys are in one piece: right ("last") or left ("first") padding if each batch row has its own bound, else the unfilled part
    of a cache.
    """

    side: str
    bound: Expr

    @property
    def is_padding(self) -> bool:
        """True if each batch row has its own bound."""
        return ix.mentions(self.bound, Index("b"))

    @property
    def words(self) -> str:
        what = f"{'right' if self.side == 'last' else 'left'} padding, " if self.is_padding else ""
        return f"{what}keys {'up to' if self.side == 'last' else 'from'} {ix.text(self.bound)}"

    @property
    def condition(self) -> Expr:
        return _up_to(self.bound) if self.side == "last" else _from(self.bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document(_Kind):
    """Query and key belong to the same document. of_key: the key's document, over (b, k); the query's is the same at q."""

    of_key: Expr

    @property
    def of_query(self) -> Expr:
        return ix.substitute(self.of_key, Index("k"), Index("q"))

    @property
    def words(self) -> str:
        return f"document {self.formula}"

    @property
    def formula(self) -> str:
        return f"{ix.text(self.of_query)} = {ix.text(self.of_key)}"

    @property
    def condition(self) -> Expr:
        return ix.compare("==", self.of_query, self.of_key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunked(_Kind):
    """Query and key fall into the same chunk of `size` positions (Llama 4), counted from `start`, which may differ by batch row."""

    size: int
    start: Expr = ix.ZERO

    @property
    def words(self) -> str:
        return f"chunks of {self.size}" + ("" if self.start == ix.ZERO else f" from {ix.text(self.start)}")

    @property
    def condition(self) -> Expr:
        query, key = (ix.apply("floordiv", ix.add(at, self.start, -1), Const(self.size)) for at in (_Q, _K))
        return ix.compare("==", query, key)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyOf(_Kind):
    """At least one alternative holds, each a conjunction of kinds (causal, or the same image block)."""

    alternatives: tuple[tuple[MaskKind, ...], ...]

    @property
    def words(self) -> str:
        return " ∨ ".join(_grouped([kind.words for kind in kinds]) for kinds in self.alternatives)

    @property
    def formula(self) -> str:
        return "(" + " ∨ ".join(_grouped([kind.formula for kind in kinds]) for kinds in self.alternatives) + ")"

    @property
    def condition(self) -> Expr:
        return ix.apply("or", *(all_of(kinds) for kinds in self.alternatives))


def all_of(kinds: tuple[MaskKind, ...]) -> Expr:
    """Return the condition that all kinds allow a pair."""
    return ix.apply("and", *(kind.condition for kind in kinds)) if kinds else ix.TRUE


def _up_to(bound: Expr) -> Expr:
    return ix.compare("<=", _K, bound)


def _from(bound: Expr) -> Expr:
    return ix.compare(">=", _K, bound)


def _grouped(texts: list[str]) -> str:
    joined = " ∧ ".join(texts) or "true"
    return f"({joined})" if len(texts) > 1 else joined


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula(_Kind):
    """A condition over (b, h, q, k) that was read in full and fits no other kind."""

    condition: Expr

    @property
    def words(self) -> str:
        return self.formula


MaskKind = Causal | CausalFrom | SlidingWindow | Prefix | KeyPadding | KeyBound | Document | Chunked | AnyOf | Formula
#: in the order in which they are printed
KINDS: tuple[type[MaskKind], ...] = (
    Causal,
    CausalFrom,
    SlidingWindow,
    Prefix,
    KeyPadding,
    KeyBound,
    Document,
    Chunked,
    AnyOf,
    Formula,
)
