"""Parts of a site: `parts` turns each proved kind of a spec into the cheapest part. Every family, and the choice, reads them here.

If a part's tensors are not available where the kernel runs, or a kind can't be a part, the model's own dense tensor is the mask. Conditions
that were not proved are a dense tensor beside the parts: the smallest one that holds them, where that is known.

Pure data: no FX, no CUDA. The parts of a spec are made once and kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Linear
from attn_compiler.lowerings.shared.parts.intervals import (
    B,
    H,
    Interval,
    K,
    Q,
    as_interval,
    band_of,
    interval_of,
)
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Call, Plan
from attn_compiler.spec import added_scores, dims, masks, reads
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import MaskKind

#: up to so many queries or keys the mask is evaluated in every tile
_FEW_QUERIES, _FEW_KEYS = 32, 128

#: kinds of parts. "lengths": the keys of a batch row up to a number, whatever the query. "rows": any other interval of keys.
#: "keys": truth values of keys, computed or given.
PartKind = Literal["band", "lengths", "rows", "keys", "documents", "mask", "bias", "slopes", "distances"]
#: parts that leave pairs out, and parts that are added to the scores
MASKING: frozenset[PartKind] = frozenset({"band", "lengths", "rows", "keys", "documents", "mask"})
ADDED: frozenset[PartKind] = frozenset({"bias", "slopes", "distances"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of a `Plan`, and the sources of each operand.

    rows: the keys that each query may use. keys: a condition over (b, k). keys_given: the dense tensor is that condition.
    documents: the document of a key, over (b, k). mask, bias: the dense tensor is used unchanged. rest: the mask is this condition on
        pairs, and not the model's tensor. slopes: a number for each head, over h. distances: kinds that are functions of h and k - q, which
        are added up.
    """

    band: Band | None = None
    rows: Interval | None = None
    keys: Expr | None = None
    keys_given: bool = False
    documents: Expr | None = None
    mask: bool = False
    rest: Expr | None = None
    bias: bool = False
    bias_grad: bool = False
    slopes: Expr | None = None
    distances: tuple[ProvedScore, ...] = ()
    distances_grad: bool = False

    @property
    def kinds(self) -> frozenset[PartKind]:
        """The kinds of parts that are present. A family refuses those that are not in its `Takes`."""
        has: dict[PartKind, bool] = {
            "band": self.band is not None,
            "lengths": self.rows is not None and self.rows.is_length,
            "rows": self.rows is not None and not self.rows.is_length,
            "keys": self.keys is not None or self.keys_given,
            "documents": self.documents is not None,
            "mask": self.mask,
            "bias": self.bias,
            "slopes": self.slopes is not None,
            "distances": bool(self.distances),
        }
        return frozenset(kind for kind, here in has.items() if here)


@functools.lru_cache(maxsize=1024)
def make_plan(spec: AttentionSpec) -> Plan:
    """Return the plan for a spec that the Triton lowering does not refuse."""
    found, sinks = parts(spec), spec.score.sinks
    # For so few queries or keys, lists are not worth a kernel of their own.
    most = ((dims.range_of(spec, spec.seqlen_q)[1], _FEW_QUERIES), (dims.range_of(spec, spec.seqlen_kv)[1], _FEW_KEYS))
    return Plan(
        band=found.band,
        rows=found.rows is not None,
        keys=found.keys is not None or found.keys_given,
        documents=found.documents is not None,
        mask=found.mask,
        bias=found.bias,
        bias_grad=found.bias_grad,
        distances=bool(found.distances),
        distances_grad=found.distances_grad,
        slopes=found.slopes is not None,
        sinks=sinks is not None,
        sinks_grad=sinks is not None and sinks.requires_grad and spec.needs_grad,
        dropout=spec.score.dropout_p > 0,
        needs_grad=spec.needs_grad,
        few_pairs=any(size is not None and size <= few for size, few in most),
    )


def leaves_out(spec: AttentionSpec) -> bool:
    """Return whether masked pairs are skipped, and not given a number to add. A row without any key then has an lse of -inf."""
    return not make_plan(spec).bias


def with_band_as_rows(found: Parts) -> Parts:
    """Return the same parts with the band as an interval of each query; for kernels without bands."""
    if found.band is None:
        return found
    interval = as_interval(found.band)
    rows = interval if found.rows is None else found.rows.both(interval)
    return dataclasses.replace(found, band=None, rows=rows)


@functools.lru_cache(maxsize=1024)
def parts(spec: AttentionSpec) -> Parts:
    """Return the parts of a spec."""
    applied = [] if spec.mask.flagged is None else [spec.mask.flagged]
    masking = _Masking(spec)
    for kind in applied:
        masking.add(kind)
    if spec.added_tensor is None:
        return masking.parts()
    added = [masking.add(kind) for kind in spec.mask.held]
    # A tensor without a kind was not recovered.
    if spec.mask.reason is not None or not (spec.mask.held or spec.score.proved):
        return _with_rest(spec, masking.parts(), are_parts=all(added))
    scoring = _scoring(spec)
    if scoring is not None and all(added):
        return _with_scores(spec, masking.parts(), scoring)
    if spec.score.proved or spec.score.bias is not None:
        # The tensor masks too. The parts only allow skipping work.
        return _with_tensor(spec, masking.parts())
    # The tensor holds the whole mask, the parts included. Tiles that the parts rule out are not read.
    return _with_tensor(spec, dataclasses.replace(masking.parts(), keys=None), only_masks=True)


def _with_rest(spec: AttentionSpec, found: Parts, *, are_parts: bool) -> Parts:
    """Add the rest of the mask that the kinds leave open. found: the parts of the kinds. are_parts: every kind became a part."""
    rest = spec.mask.rest
    if rest is not None and are_parts and not reads.names(rest) & set(spec.mask.out_of_reach):
        return dataclasses.replace(found, mask=True, rest=rest.condition)
    if not spec.mask.is_partial or spec.score.proved or spec.score.bias is not None:
        # The tensor masks too. The parts only allow skipping work.
        return _with_tensor(spec, found)
    # The tensor holds the whole mask. Tiles that the parts rule out are not read.
    return _with_tensor(spec, dataclasses.replace(found, keys=None), only_masks=True)


def _with_tensor(spec: AttentionSpec, found: Parts, *, only_masks: bool = False) -> Parts:
    """Add the model's own tensor for everything that the parts leave open. only_masks: a float one holds only 0 and lowest numbers."""
    dense, bias = spec.mask.dense, spec.score.bias
    own = {name: getattr(found, name) for name in ("band", "rows", "keys", "documents")}
    if dense is None:
        return Parts(**own, bias=True, bias_grad=bias is not None and bias.requires_grad and spec.needs_grad)
    if spec.score.by_highest and _is_over_keys(dense, spec):
        return Parts(**own, keys_given=True)
    if not dense.is_bool and not only_masks:
        return Parts(**own, bias=True)
    if found.keys is None and _is_over_keys(dense, spec):
        return Parts(**own, keys_given=True)
    return Parts(**own, mask=True)


def _is_over_keys(dense: masks.Dense, spec: AttentionSpec) -> bool:
    """Return whether a dense mask depends on the key alone."""
    shape = (*(1,) * (4 - len(dense.shape)), *dense.shape)
    return shape[1] == shape[2] == 1 and dims.same(shape[3], spec.seqlen_kv)


# ---- masks --------------------------------------------------------------------------------------------------------


@dataclass
class _Masking:
    """The parts of the kinds so far."""

    spec: AttentionSpec
    band: Band | None = None
    rows: Interval | None = None
    keys: list[Expr] = field(default_factory=list)
    documents: Expr | None = None

    def parts(self) -> Parts:
        keys = ix.apply("and", *self.keys) if self.keys else None
        return Parts(band=self.band, rows=self.rows, keys=keys, documents=self.documents)

    def add(self, kind: MaskKind) -> bool:
        """Make the kind a part, or part of one. Returns False, and does nothing, if that is impossible."""
        if reads.names(kind) & set(self.spec.mask.out_of_reach):
            return False
        if isinstance(kind, masks.Document):
            return self._add_document(kind.of_key)
        band = band_of(kind, self.spec)
        if band is not None:
            return self._add_band(band)
        interval = interval_of(kind)
        if interval is not None:
            self.rows = interval if self.rows is None else self.rows.both(interval)
            return True
        if isinstance(kind, masks.AnyOf) or ix.mentions(kind.condition, Q, H):
            return False
        self.keys.append(kind.condition)
        return True

    def _add_document(self, of_key: Expr) -> bool:
        if self.documents not in (None, of_key) or ix.kind_of(of_key) == "float" or ix.mentions(of_key, Q, H):
            return False
        self.documents = of_key
        return True

    def _add_band(self, band: Band) -> bool:
        """Merge two bands from the same corner. A band from the other corner becomes an interval of each query."""
        if self.band is None:
            self.band = band
        elif self.band.from_end == band.from_end:
            left, right = _least(self.band.left, band.left), _least(self.band.right, band.right)
            self.band = Band(left=left, right=right, from_end=band.from_end)
        else:
            interval = as_interval(band)
            self.rows = interval if self.rows is None else self.rows.both(interval)
        return True


# ---- scores -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scoring:
    slopes: Expr | None = None
    distances: tuple[ProvedScore, ...] = ()


def _with_scores(spec: AttentionSpec, found: Parts, scoring: _Scoring) -> Parts:
    return Parts(
        band=found.band,
        rows=found.rows,
        keys=found.keys,
        documents=found.documents,
        slopes=scoring.slopes,
        distances=scoring.distances,
        distances_grad=spec.needs_grad and any(map(_wants_gradient, scoring.distances)),
    )


def _scoring(spec: AttentionSpec) -> _Scoring | None:
    """Return the parts of the added kinds; None if the tensor itself has to be added, or its gradient would be lost."""
    proved = spec.score.proved
    if spec.score.bias is not None and spec.score.bias.requires_grad and not any(_wants_gradient(k) for k in proved):
        return None
    slopes: Expr | None = None
    distances: list[ProvedScore] = []
    for kind in proved:
        own = _slopes(kind, spec)
        if own is not None:
            slopes = own if slopes is None else ix.add(slopes, own)
        elif _is_of_distance(kind, spec):
            distances.append(kind)
        else:
            return None
    return _Scoring(slopes=slopes, distances=tuple(distances))


def _wants_gradient(kind: ProvedScore) -> bool:
    return bool(getattr(kind, "requires_grad", False))


def _slopes(kind: ProvedScore, spec: AttentionSpec) -> Expr | None:
    """Return slope(h) of a kind that adds slope(h) · (k - q), up to a number for each row, which only a sink would make visible."""
    if not isinstance(kind, added_scores.Alibi) or kind.requires_grad or ix.kind_of(kind.position) != "int":
        return None
    form = ix.linear(kind.position)
    factor = dict(form.terms).get(K)
    if factor is None:
        return None
    rest = ix.combine(form, ix.linear(K), -factor)
    if ix.mentions(rest, K, H) or (spec.score.sinks is not None and rest != Linear(((Q, -factor),))):
        return None
    if ix.mentions(kind.slopes, B, Q, K) or reads.names_in(kind.slopes) & set(spec.score.out_of_reach):
        return None
    return ix.mul(ix.as_float(kind.slopes), Const(float(factor)))


def _is_of_distance(kind: ProvedScore, spec: AttentionSpec) -> bool:
    """Return whether a kind is a function of the head and of k - q that can be evaluated."""
    if isinstance(kind, added_scores.Bias) or reads.names(kind) & set(spec.score.out_of_reach):
        return False
    if ix.mentions(kind.summand, B) or not ix.mentions(kind.summand, K):
        return False
    # A function of k - q alone has no q left once k is replaced by k + q.
    return not ix.mentions(ix.substitute(kind.summand, K, ix.add(K, Q)), Q)


# ---- expressions --------------------------------------------------------------------------------------------------


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def differentiable(operands: Sequence[Any], text: str) -> list[bool]:
    """Return for each operand of a leaf op whether it gets a gradient. text: a kernel_plan.Call.

    Raises ValueError if the number of operands is not the plan's.
    """
    plan = make_plan(Call.from_text(text).spec)
    if len(plan.operands) != len(operands):
        raise ValueError(f"the plan has the operands {', '.join(plan.operands) or 'none'}; got {len(operands)}")
    return [name in plan.differentiable for name in plan.operands]
