"""Comparison of the recovered mask and the proved biases with the model's own tensors, at every (b, h, q, k), in slices of bounded size.

Masks: no difference is allowed. If the condition holds, the model must allow the pair (True, or 0 added); otherwise it must mask it (False,
or at most float16's lowest number added). With a bias, a number between belongs to the bias, and the bias itself may mask a pair, too.

Biases: their sum at every pair that is not masked. Rounding is allowed, in each batch row and head: the model rounds after each of its
operations. Numbers cut to integers (T5's buckets) may fall on either side of a near boundary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Expr, Index
from attn_compiler.index_expr.on_tensors import evaluate_on
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.arrange import arrange, simplified
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Match, Site, Term
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW, STILL_MASKED_BELOW
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.spec.numerics import difference, largest
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.values import Check, NoValueError, Values

#: pairs of one slice, evaluated at once in int64 or float64
MOST_PAIRS = 2**24

#: the model's effect on a pair
MASKED, ALLOWED, NEITHER = 0, 1, 2
_WORDS = {MASKED: "masked out", ALLOWED: "allowed", NEITHER: "neither allowed nor masked out"}

#: A mask plus a bias may be above float16's lowest number; no penalty is this low
BIASED_MASKED_BELOW = MASKED_BELOW / 2

NAMES = ("b", "h", "q", "k")

#: rounding ops on floats, without a final underscore -> the largest error in units in the last place.
#: For a power or an exponential it grows with the exponent's own error
_ROUNDED = dict.fromkeys(("add", "sub", "rsub", "mul", "div", "reciprocal", "to", "_to_copy", "type_as"), 1)
_ROUNDED |= {"log": 2, **dict.fromkeys(("exp", "exp2", "pow"), 16)}
#: units for the fill value of an element, and for the sum with other biases
_ALWAYS = 2
#: units for operations outside of the body that a bias is passed to, which are not searched
_OUTSIDE = 8


class Slice(NamedTuple):
    """One batch row, one head, and queries from `first` up to `end`."""

    b: int
    h: int
    first: int
    end: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return (1, 1, queries or 1, keys or 1)."""
        for dim, (start, end) in enumerate(((self.b, self.b + 1), (self.h, self.h + 1), (self.first, self.end))):
            x = x if x.shape[dim] == 1 else x.narrow(dim, start, end - start)
        return x


def slices(sizes: tuple[int, ...]) -> Iterator[Slice]:
    step = max(1, MOST_PAIRS // max(1, sizes[3]))
    for b, h, first in itertools.product(range(sizes[0]), range(sizes[1]), range(0, sizes[2], step)):
        yield Slice(b, h, first, min(first + step, sizes[2]))


# ---- the model's own tensors ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Own:
    """One of the model's own tensors. x: broadcasts to (B, Hq, Sq, Skv). adds: it is added; else it holds truth values."""

    x: torch.Tensor
    term: Term
    adds: bool

    def effects(self, at: Slice | None = None, lowest: float = MASKED_BELOW) -> torch.Tensor:
        """Return its effect on each pair: MASKED, ALLOWED or NEITHER, as int8. lowest: numbers up to here mask."""
        x, term = self.x if at is None else at.of(self.x), self.term
        if not self.adds:
            return ((x != 0) ^ term.inverted).to(torch.int8)
        masked = (x <= lowest) & (x * term.weight <= STILL_MASKED_BELOW)
        return torch.where(masked, MASKED, torch.where(x == 0, ALLOWED, NEITHER)).to(torch.int8)

    def element(self, place: Sequence[int]) -> Any:
        return self.x[tuple(i if size != 1 else 0 for i, size in zip(place, self.x.shape, strict=True))].item()


def biases(site: Site) -> tuple[ProvedScore, ...]:
    """Return the proved biases besides the mask."""
    return site.spec.score.proved if site.spec is not None else ()


def shape(match: Match, values: Values) -> tuple[int, ...]:
    """Return (B, Hq, Sq, Skv) as numbers."""
    dims = (match.axes.batch, match.axes.heads, match.axes.query, match.axes.key)
    return tuple(values.size(axes.dim_size(dim)) for dim in dims)


def own(site: Site, values: Values) -> list[Own]:
    """Return every tensor that the model adds or masks with, as it is at its use. Raises NoValueError."""
    kinds = ((site.added, True), (site.allowed, False))
    return [Own(x=_arranged(site, x, values), term=x, adds=adds) for parts, adds in kinds for x in parts]


def _arranged(site: Site, term: Term, values: Values) -> torch.Tensor:
    """Arrange a term's tensor to broadcast to (B, Hq, Sq, Skv)."""
    operand, match = term.operand, site.match
    x = values.tensor(operand.node, values.body(operand.used).mirror.order(operand.used))
    if values.asked is not None:
        return torch.empty(0, 0, 0, 0)
    reads = {atom: atom for atom in axes.flat(operand.dims)}
    pair = (match.axes.batch, match.axes.heads, match.axes.query, match.axes.key)
    try:
        recipe = simplified(arrange(operand.dims, reads, pair, broadcast=True))
    except AxisError as error:
        raise NoValueError(f"{operand.node.name} can't be brought into (b, h, q, k): {error}") from error
    found: torch.Tensor = recipe.run(x, lambda f, x, *args: f(x, *args), values.size)
    return found


def combined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Combine effects: one tensor that masks is enough."""

    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where((x == MASKED) | (y == MASKED), MASKED, torch.maximum(x, y)).to(torch.int8)

    return reduce(both, parts)


def rows_with_keys(site: Site, values: Values) -> torch.Tensor | None:
    """Return the rows with any allowed key: bool, broadcasts to (B, Hq, Sq, 1). None if the site has no mask."""
    found = own(site, values)
    if not found:
        return None
    full = tuple(torch.broadcast_shapes(*(one.x.shape for one in found)))  # type: ignore[no-untyped-call]
    rows = torch.empty(*full[:3], 1, dtype=torch.bool, device=found[0].x.device)
    for at in slices(full):
        at.of(rows).copy_((combined(one.effects(at) for one in found) != MASKED).any(-1, keepdim=True))
    return rows


# ---- what was recovered ---------------------------------------------------------------------------------------------


def evaluated(
    x: Expr,
    at: Slice,
    keys: int,
    values: Values,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    nudge: float = 0.0,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Evaluate an expression on a slice, broadcasting to (queries, keys). Raises NoValueError, and `evaluate_on`'s errors of indices.
    positions: of all queries, if they are not 0, 1, 2, ..."""
    queries = torch.arange(at.first, at.end, device=device) if positions is None else positions[at.first : at.end]
    b, h, k = torch.tensor(at.b, device=device), torch.tensor(at.h, device=device), torch.arange(keys, device=device)
    grid: dict[str, Any] = {**values.symbols, "b": b, "h": h, "q": queries[:, None], "k": k}
    try:
        return evaluate_on(x, grid, tensors, nudge=nudge)
    except KeyError as error:
        raise NoValueError(f"the size {error} is not known on the first call") from error
    except NotImplementedError as error:
        raise NoValueError(str(error)) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Recovered:
    """Recovered expressions of a site, beside the model's own tensors, slice by slice.

    words: for people, as in VerificationMismatch; "expected": of values in general. sizes: the part of (B, Hq, Sq, Skv) to evaluate: one
    index is enough along an axis on which nothing depends. tensors: read by the loads.
    """

    values: Values
    expressions: Sequence[Expr]
    words: Mapping[str, str]
    own: list[Own]
    sizes: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def read(
        site: Site, values: Values, expressions: Sequence[Expr], known: Mapping[str, Version], **words: str
    ) -> Recovered:
        """Read the inputs of a comparison. known: the versions that the expressions load from. Raises NoValueError."""
        found, full = own(site, values), shape(site.match, values)
        varies = {
            dim
            for dim, name in enumerate(NAMES)
            if any(ix.mentions(x, Index(name)) for x in expressions) or any(one.x.shape[dim] != 1 for one in found)
        }
        names = {name for x in expressions for name in x.facts.tensors}
        for name in names - known.keys():
            raise NoValueError(f"where {name} is read from is not known")
        return Recovered(
            values=values,
            expressions=expressions,
            words={"site": site.module, **words},
            own=found,
            sizes=tuple(n if dim in varies else min(n, 1) for dim, n in enumerate(full)),
            tensors={name: values.at(known[name]) for name in names},
        )

    def on(self, at: Slice, device: torch.device, *, nudge: float = 0.0) -> list[torch.Tensor]:
        """Evaluate the expressions on a slice, broadcasting to (queries, keys). Raises VerificationMismatch if one has no value."""
        try:
            given = (at, self.sizes[3], self.values, self.tensors, device)
            return [evaluated(x, *given, nudge=nudge) for x in self.expressions]
        except (IndexError, ZeroDivisionError) as error:
            index = f"b={at.b}, h={at.h}, q from {at.first} up to {at.end}"
            found = {"observed": f"a formula that has no value: {error}", "differing": "at least one pair"}
            raise VerificationMismatch(**{**self.words, **found}, index=index) from error

    def mismatch(self, at: Slice, pair: Sequence[int], wrong: torch.Tensor, expected: str, **found: str) -> Exception:
        """Make the error. pair: query and key in a slice, which differ. wrong: True for all such pairs of the slice."""
        place = (at.b, at.h, at.first + int(pair[0]), int(pair[1]))
        index = ", ".join(f"{name}={i}" for name, i in zip(NAMES, place, strict=True))
        held = ", ".join(f"{one.term.operand.node.name} holds {one.element(place)}" for one in self.own)
        differing = f"{int(wrong.sum())} of {wrong.numel()} pairs of its slice"
        found |= {"index": index, "expected": f"{expected} ({held})", "differing": differing}
        return VerificationMismatch(**{**self.words, **found})


def mask_formula(site: Site) -> str:
    """Return the recovered condition in words."""
    return "(not read)" if site.condition is None else ix.text(site.condition)


def _proved(site: Site, values: Values) -> Recovered:
    """Return the proved biases. Raises NoValueError."""
    said = {"what": "recovered bias", "expected": "numbers that are added", "allowed": "rounding"}
    summands, formula = [kind.summand for kind in biases(site)], str(site.spec and site.spec.score.added)
    return Recovered.read(site, values, summands, site.score_loads, formula=formula, **said)


class MaskCheck(Check):
    subject = "mask"

    @property
    def formula(self) -> str | None:
        return None if self.site.condition is None else mask_formula(self.site)

    def read(self, values: Values) -> tuple[Recovered, Recovered | None]:
        site = self.site
        if site.condition is None:
            mask = site.spec.mask if site.spec is not None else None
            raise NoValueError((mask.reason if mask is not None else None) or "the mask was not read")
        words = {"what": "recovered mask", "expected": "a mask", "allowed": "no difference"}
        found = Recovered.read(site, values, [site.condition], site.loads, formula=mask_formula(site), **words)
        return found, _proved(site, values) if biases(site) else None

    def compare(self, values: Values) -> Compared:
        mask, bias = self.read(values)
        for at in slices(mask.sizes):
            lowest = MASKED_BELOW if bias is None else BIASED_MASKED_BELOW
            expected = combined(one.effects(at, lowest) for one in mask.own)
            if bias is not None:
                # Other numbers are added besides the mask.
                expected = torch.where(expected == NEITHER, ALLOWED, expected).to(torch.int8)
            (got,) = mask.on(at, expected.device)
            differs = (expected != got.to(torch.int8)).broadcast_to(1, 1, at.end - at.first, mask.sizes[3])
            if bias is not None and bool(differs.any()):
                # An unread bias may be as low as a mask, too.
                low = [x <= STILL_MASKED_BELOW for x in bias.on(at, expected.device)]
                differs = differs & ~((expected == MASKED) & reduce(torch.logical_or, low))
            if bool(differs.any()):
                pair = differs[0, 0].nonzero()[0].tolist()
                effect = int(expected.expand_as(differs)[0, 0, pair[0], pair[1]])
                recovered = {MASKED: "allowed", ALLOWED: "masked out"}
                observed = recovered.get(effect, "a condition, which allows or masks out")
                raise mask.mismatch(at, pair, differs, _WORDS[effect], observed=observed)
        return Compared(elements=math.prod(mask.sizes))


class BiasCheck(Check):
    subject = "bias"

    @property
    def formula(self) -> str | None:
        return self.site.spec.score.added if self.site.spec is not None else None

    def read(self, values: Values) -> Recovered:
        return _proved(self.site, values)

    def compare(self, values: Values) -> Compared:
        if not self.site.added:
            raise NoValueError("the model adds no tensor")
        proved, relative = self.read(values), rounding(self.site, values)
        return Compared.merged(_sums(at, proved, relative) for at in slices(proved.sizes))


def _sums(at: Slice, proved: Recovered, relative: float) -> Compared:
    """Compare the sums on a slice. relative: the allowed error, for the largest number."""
    size = (1, 1, at.end - at.first, proved.sizes[3])
    kept = (combined(one.effects(at, BIASED_MASKED_BELOW) for one in proved.own) != MASKED).expand(size)
    added = [(at.of(one.x).to(torch.float64) * one.term.weight).expand(size) for one in proved.own if one.adds]
    exact = reduce(torch.add, added)
    allowed = relative * max(largest(x, kept & x.isfinite()) for x in added)

    def total(nudge: float) -> torch.Tensor:
        """Return the sum of the kinds, float64."""
        return sum(proved.on(at, exact.device, nudge=nudge), exact.new_zeros(())).expand(exact.shape)

    def off(nudge: float) -> torch.Tensor:
        return torch.where(kept, difference(total(nudge), exact), 0.0)

    error = off(0.0)
    if bool((error > allowed).any()) and any(map(_cuts_off, proved.expressions)):
        error = reduce(torch.minimum, (off(nudge) for nudge in (relative, -relative)), error)
    found = float(error.max()) if error.numel() else 0.0
    if not found <= allowed:
        place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        ours, theirs = (f"{x[place].item():.6g}" for x in (total(0.0), exact))
        said = {"observed": ours, "allowed": f"a difference of {allowed:.3g}"}
        raise proved.mismatch(at, place[2:], error > allowed, theirs, **said)
    return Compared(elements=int(kept.sum()), error=found, allowed=allowed)


def _cuts_off(x: Expr) -> bool:
    return (isinstance(x, Apply) and x.op == "int") or any(map(_cuts_off, ix.parts(x)))


def rounding(site: Site, values: Values) -> float:
    """Return the largest error of the model's addition at a site, relative to its largest number. It sums the errors of the operations
    between the addition and the tensors that it is read from."""
    loads = {version.node for version in site.score_loads.values()}
    ends, total = [term.operand.node for term in site.added], 0.0
    for node in reached(ends, lambda node: () if node in loads else node.all_input_nodes):
        name = node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""
        total += _ROUNDED.get(name.rstrip("_"), 0) * _epsilon(node)
        if node.op == "placeholder" and node not in loads and len(values.bodies) > 1:
            total += _OUTSIDE * max(_epsilon(n) for graph in values.bodies for n in graph.nodes)
    return total + _ALWAYS * max((_epsilon(node) or torch.finfo(torch.float32).eps for node in ends), default=0.0)


def _epsilon(node: fx.Node) -> float:
    """Return the eps of a node's floating dtype, else 0."""
    value = node.meta.get("val")
    return torch.finfo(value.dtype).eps if isinstance(value, torch.Tensor) and value.is_floating_point() else 0.0
