"""Proved kinds of an added tensor. Pure data, no FX, no CUDA.

A proved kind has `words` for people and a `summand`: the expression of its addition to one score, up to rounding. To add one: a class here,
its name in PROVED_KINDS, its recogniser in passes/recovering/score_kinds.py, and its test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.index_expr.reach import is_known, reach
from attn_compiler.spec.codec import UNSAID

#: characters of a formula in the words of a kind
_MOST = 80
#: the lowest number of float16: an added number this low counts as masking
_MASKS_BELOW = -65504.0


def _times(weight: float) -> str:
    return "" if weight == 1.0 else f"{weight:g} · "


def _with_gradient(requires_grad: bool) -> str:
    return " with gradient" if requires_grad else ""


def _element(tensor: str, at: tuple[Expr, ...], weight: float) -> Expr:
    return ix.mul(Load(tensor, at, "float"), Const(weight))


@dataclass(frozen=True, kw_only=True, slots=True)
class Alibi:
    """slope · position. slopes: over h and run-time tensors. position: an integer, linear in k or in the distance of k and q.

    A position without the query (Bloom's slope · k) differs by one number for each row, which cancels in the softmax. A position may be
    read from a tensor: position[b, k], counted from an attention mask, known at run time only. requires_grad: the slopes are learned.
    """

    slopes: Expr
    position: Expr
    requires_grad: bool = False

    @property
    def words(self) -> str:
        slopes = ix.text(self.slopes) if isinstance(self.slopes, Load) else "slopes(h)"
        position = ix.text(self.position, _MOST)
        position = f"({position})" if isinstance(self.position, ix.Linear) else position
        return f"ALiBi {slopes} · {position}{_with_gradient(self.requires_grad)}"

    @property
    def summand(self) -> Expr:
        """The addition to the score of (b, h, q, k)."""
        return ix.mul(self.slopes, ix.as_float(self.position))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogBuckets:
    """T5's buckets of a distance k - q: one for each short distance, then logarithmically wider ones up to max_distance. both_ways: keys
    after the query have separate buckets; else they share bucket 0 with the query's own position."""

    count: int
    max_distance: int
    both_ways: bool

    @property
    def words(self) -> str:
        return f"{self.count} buckets up to {self.max_distance}, {'both ways' if self.both_ways else 'backwards'}"

    def bucket(self, distance: int) -> int:
        """Return the bucket of one distance, with logarithms of doubles (T5's are float32)."""
        count, first = self.count, 0
        if self.both_ways:
            count //= 2
            first, distance = (count if distance > 0 else 0), abs(distance)
        else:
            distance = -min(distance, 0)
        exact = count // 2
        if distance < exact:
            return first + distance
        wide = math.log(distance / exact) / math.log(self.max_distance / exact) * (count - exact)
        return first + min(exact + int(wide), count - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeBias:
    """A table's element by the distance of key and query: table[row(k - q), h].

    at: the table's indices, over h, k - q and run-time scalars. buckets: T5's, if the row is exactly those of `distance`, which is k - q up
    to numbers known at run time only (a cache's length). weight: a factor on the element.
    """

    table: str
    at: tuple[Expr, ...]
    distance: Expr
    buckets: LogBuckets | None = None
    weight: float = 1.0
    requires_grad: bool = False

    @property
    def words(self) -> str:
        distance = ix.text(self.distance)
        row = f"bucket({distance})" if self.buckets is not None else f"f({distance})"
        at = ", ".join(ix.text(i) if isinstance(i, Index | ix.Const) else row for i in self.at)
        name = f"T5 relative bias ({self.buckets.words})" if self.buckets is not None else "relative bias"
        return f"{name} {_times(self.weight)}{self.table}[{at}]{_with_gradient(self.requires_grad)}"

    @property
    def summand(self) -> Expr:
        """The addition to the score of (b, h, q, k)."""
        return _element(self.table, self.at, self.weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredBias:
    """A table's element by an index for each query and key: table[index[q, k], h] (Swin). at: the table's indices, over (b, h, q, k) and
    run-time tensors. weight: a factor on the element."""

    table: str
    at: tuple[Expr, ...]
    weight: float = 1.0
    requires_grad: bool = False

    @property
    def words(self) -> str:
        element = ix.text(Load(self.table, self.at, "float"), _MOST)
        return f"gathered bias {_times(self.weight)}{element}{_with_gradient(self.requires_grad)}"

    @property
    def summand(self) -> Expr:
        """The addition to the score of (b, h, q, k)."""
        return _element(self.table, self.at, self.weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPenalty:
    """A number, too near to zero to mask, added if query and key are of different regions (Swin's shifted windows). of_key: the key's
    region, an integer over (b, k) and run-time tensors; the query's is the same at q."""

    value: float
    of_key: Expr

    @property
    def words(self) -> str:
        return f"{self.value:g} between regions"

    @property
    def summand(self) -> Expr:
        """The addition to the score of (b, h, q, k)."""
        of_query = ix.substitute(self.of_key, Index("k"), Index("q"))
        return ix.where(ix.compare("==", of_query, self.of_key), Const(0.0), Const(self.value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalty:
    """A number, too near to zero to mask, added where a condition holds (the -10000 of older models)."""

    value: float
    condition: Expr

    @property
    def words(self) -> str:
        return f"{self.value:g} where {ix.text(self.condition, _MOST)}"

    @property
    def summand(self) -> Expr:
        """The addition to the score of (b, h, q, k)."""
        return ix.where(self.condition, Const(self.value), Const(0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bias:
    """A tensor that is an input, or whose computation could not be read. at: its indices, over (b, h, q, k). shape: (B, Hq, Sq, Skv), with
    1 for a broadcast axis. weight: a factor on the element. may_shut_out: nothing says that it is no mask, too."""

    tensor: str
    at: tuple[Expr, ...]
    shape: tuple[int | str, ...]
    weight: float = 1.0
    requires_grad: bool = False
    may_shut_out: bool = field(default=False, metadata=UNSAID)

    @property
    def varies_along(self) -> str:
        """The letters of the axes that it depends on, of "bhqk"."""
        return "".join(axis for axis in "bhqk" if any(ix.mentions(i, Index(axis)) for i in self.at))

    @property
    def words(self) -> str:
        dims = ix.shortened(", ".join(map(str, self.shape)), _MOST // 2)
        along = f"over {', '.join(self.varies_along)}" if self.varies_along else "one number"
        return f"bias {_times(self.weight)}{self.tensor}[{dims}] {along}{_with_gradient(self.requires_grad)}"

    @property
    def summand(self) -> Expr:
        """The addition to the score of (b, h, q, k)."""
        return _element(self.tensor, self.at, self.weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasFormula:
    """A bias that was read in full and fits no other kind."""

    value: Expr
    requires_grad: bool = False

    @property
    def words(self) -> str:
        return f"bias {ix.text(self.value, _MOST * 3 // 2)}{_with_gradient(self.requires_grad)}"

    @property
    def summand(self) -> Expr:
        """The addition to the score of (b, h, q, k)."""
        return self.value

    @property
    def may_shut_out(self) -> bool:
        """True if run-time values may make it as low as numbers that mask: (1 - mask) · lowest."""
        return bool(ix.loads(self.value)) and reach(self.value, {}).low <= _MASKS_BELOW


ProvedScore = Alibi | RelativeBias | GatheredBias | RegionPenalty | Penalty | Bias | BiasFormula


#: in the order in which they are printed
PROVED_KINDS: tuple[type[ProvedScore], ...] = (
    Alibi,
    RelativeBias,
    GatheredBias,
    RegionPenalty,
    Penalty,
    Bias,
    BiasFormula,
)


def largest(kind: ProvedScore) -> float:
    """Return the largest number that a kind is known to add; if run-time values decide, its largest addition above zero."""
    own = reach(kind.summand, {})
    return max(own.high, -own.low) if is_known(kind.summand) else own.high


#: classes of fields of proved kinds
PARTS: tuple[type[LogBuckets], ...] = (LogBuckets,)
