"""The model's own masks and biases over (b, h, q, k), and recovered expressions beside them.

A pair is a query and a key of one batch row and head. Tensors and expressions are evaluated in slices of bounded size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr, Index
from attn_compiler.index_expr.on_tensors import evaluate_on
from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.arrange import arrange, simplified
from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.graph.site import Match, Site, Term
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW, STILL_MASKED_BELOW
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.spec.added_scores import ProvedScore
from attn_compiler.verifying.values import NoValueError, Values

#: pairs of one slice, evaluated at once in int64 or float64
MOST_PAIRS = 2**24

#: the model's effect on a pair
MASKED, ALLOWED, NEITHER = 0, 1, 2

#: A mask plus a bias may be above float16's lowest number; no penalty is this low
BIASED_MASKED_BELOW = MASKED_BELOW / 2

NAMES = ("b", "h", "q", "k")


@dataclass(frozen=True, kw_only=True, eq=False)
class Own:
    """One of the model's own tensors. x: broadcasts to (B, Hq, Sq, Skv). adds: it is added; else it holds truth values."""

    x: torch.Tensor
    term: Term
    adds: bool

    def at(self, place: Slice) -> Own:
        return Own(x=sliced(self.x, place), term=self.term, adds=self.adds)

    def element(self, place: Sequence[int]) -> Any:
        return self.x[tuple(i if size != 1 else 0 for i, size in zip(place, self.x.shape, strict=True))].item()


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One batch row, one head, and queries from `first` up to `end`."""

    b: int
    h: int
    first: int
    end: int

    def place(self, query: int, key: int) -> tuple[int, int, int, int]:
        """Return (b, h, q, k) of a pair. query: counted from the slice's first."""
        return self.b, self.h, self.first + query, key

    def __str__(self) -> str:
        return f"b={self.b}, h={self.h}, q from {self.first} up to {self.end}"


def terms(site: Site) -> tuple[Term, ...]:
    return (*site.added, *site.allowed)


def biases(site: Site) -> tuple[ProvedScore, ...]:
    """Return the proved biases besides the mask."""
    return site.spec.score.proved if site.spec is not None else ()


def read(site: Site, loads: Iterable[tuple[Expr, Mapping[str, Version]]], values: Values) -> None:
    """Read the site's own tensors, and the loads of each expression. Raises NoValueError."""
    for term in terms(site):
        term_tensor(term, values)
    for x, known in loads:
        loaded([x], known, values)


def term_tensor(term: Term, values: Values) -> torch.Tensor:
    """Return a term's tensor at its use in the model. Raises NoValueError."""
    used = term.operand.used
    return values.tensor(term.operand.node, values.mirror_of(used).order(used))


def loaded(expressions: Iterable[Expr], known: Mapping[str, Version], values: Values) -> dict[str, torch.Tensor]:
    """Return the tensors that expressions load from. Raises NoValueError."""
    names = {load.tensor for x in expressions for load in ix.loads(x)}
    for name in names - known.keys():
        raise NoValueError(f"where {name} is read from is not known")
    return {name: values.at(known[name]) for name in names}


def shape(match: Match, values: Values) -> tuple[int, ...]:
    """Return (B, Hq, Sq, Skv) as numbers."""
    return tuple(
        values.size(axes.dim_size(dim))
        for dim in (match.axes.batch, match.axes.heads, match.axes.query, match.axes.key)
    )


def own(site: Site, values: Values) -> list[Own]:
    """Return every tensor that the model adds or masks with. Raises NoValueError."""
    adds = [True] * len(site.added) + [False] * len(site.allowed)
    return [
        Own(x=_arranged(site.match, term, values), term=term, adds=added)
        for term, added in zip(terms(site), adds, strict=True)
    ]


def _arranged(match: Match, term: Term, values: Values) -> torch.Tensor:
    """Arrange a term's tensor to broadcast to (B, Hq, Sq, Skv)."""
    operand = term.operand
    reads = {atom: atom for atom in axes.flat(operand.dims)}
    pair = (match.axes.batch, match.axes.heads, match.axes.query, match.axes.key)
    try:
        recipe = simplified(arrange(operand.dims, reads, pair, broadcast=True))
    except AxisError as error:
        raise NoValueError(f"{operand.node.name} can't be brought into (b, h, q, k): {error}") from error
    found: torch.Tensor = recipe.run(term_tensor(term, values), lambda f, x, *args: f(x, *args), values.size)
    return found


# ---- the model's effect on a pair ---------------------------------------------------------------------------------


def effects(one: Own, lowest: float = MASKED_BELOW) -> torch.Tensor:
    """Return one tensor's effect on each pair: MASKED, ALLOWED or NEITHER, as int8. lowest: numbers up to here mask."""
    x, term = one.x, one.term
    if not one.adds:
        return ((x != 0) ^ term.inverted).to(torch.int8)
    masked = (x <= lowest) & (x * term.weight <= STILL_MASKED_BELOW)
    return torch.where(masked, MASKED, torch.where(x == 0, ALLOWED, NEITHER)).to(torch.int8)


def combined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Combine effects: one tensor that masks is enough."""
    result = parts[0]
    for part in parts[1:]:
        either = torch.maximum(result, part)
        result = torch.where((result == MASKED) | (part == MASKED), MASKED, either).to(torch.int8)
    return result


def rows_with_keys(site: Site, values: Values) -> torch.Tensor | None:
    """Return the rows with any allowed key: bool, broadcasts to (B, Hq, Sq, 1). None if the site has no mask."""
    if not terms(site):
        return None
    rows = None
    found = own(site, values)
    full = tuple(torch.broadcast_shapes(*(one.x.shape for one in found)))  # type: ignore[no-untyped-call]
    for at in slices(full):
        part = combined([effects(one.at(at)) for one in found]) != MASKED
        if rows is None:
            rows = torch.empty(*full[:3], 1, dtype=torch.bool, device=part.device)
        sliced(rows, at).copy_(part.any(-1, keepdim=True))
    return rows


# ---- slices -------------------------------------------------------------------------------------------------------


def slices(sizes: tuple[int, ...]) -> Iterator[Slice]:
    step = max(1, MOST_PAIRS // max(1, sizes[3]))
    for b, h, first in itertools.product(range(sizes[0]), range(sizes[1]), range(0, sizes[2], step)):
        yield Slice(b=b, h=h, first=first, end=min(first + step, sizes[2]))


def sliced(x: torch.Tensor, at: Slice) -> torch.Tensor:
    """Return (1, 1, queries or 1, keys or 1)."""
    for dim, (start, end) in enumerate(((at.b, at.b + 1), (at.h, at.h + 1), (at.first, at.end))):
        if x.shape[dim] != 1:
            x = x[(slice(None),) * dim + (slice(start, end),)]
    return x


def varying(expressions: Sequence[Expr], found: list[Own], full: tuple[int, ...]) -> tuple[int, ...]:
    """Return the part of (B, Hq, Sq, Skv) to evaluate: one index is enough along an axis on which nothing depends."""
    return tuple(
        size
        if any(ix.mentions(x, Index(name)) for x in expressions) or any(one.x.shape[dim] != 1 for one in found)
        else min(size, 1)
        for dim, (name, size) in enumerate(zip(NAMES, full, strict=True))
    )


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
    grid: dict[str, int | torch.Tensor] = {
        **values.symbols,
        "b": torch.tensor(at.b, device=device),
        "h": torch.tensor(at.h, device=device),
        "q": queries[:, None],
        "k": torch.arange(keys, device=device),
    }
    try:
        return evaluate_on(x, grid, tensors, nudge=nudge)
    except KeyError as error:
        raise NoValueError(f"the size {error} is not known on the first call") from error
    except NotImplementedError as error:
        raise NoValueError(str(error)) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Recovered:
    """Recovered expressions of a site, beside the model's own tensors, slice by slice.

    what, formula: their name and text, for people. gives: their expected values. sizes: the part of (B, Hq, Sq, Skv) to evaluate. tensors:
    read by their loads.
    """

    site: Site
    values: Values
    what: str
    formula: str
    gives: str
    allowed: str
    own: list[Own]
    sizes: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def from_site(
        site: Site, values: Values, expressions: Sequence[Expr], known: Mapping[str, Version], **words: str
    ) -> Recovered:
        """Read the inputs of a comparison. known: the versions that the expressions load from. Raises NoValueError."""
        found = own(site, values)
        sizes = varying(expressions, found, shape(site.match, values))
        tensors = loaded(expressions, known, values)
        return Recovered(site=site, values=values, own=found, sizes=sizes, tensors=tensors, **words)

    def slices(self) -> Iterator[Slice]:
        return slices(self.sizes)

    def on(self, x: Expr, at: Slice, device: torch.device, *, nudge: float = 0.0) -> torch.Tensor:
        """Evaluate one expression on a slice, broadcasting to (queries, keys). Raises VerificationMismatch if it has no value."""
        try:
            return evaluated(x, at, self.sizes[3], self.values, self.tensors, device, nudge=nudge)
        except (IndexError, ZeroDivisionError) as error:
            raise self._mismatch(
                index=str(at),
                expected=self.gives,
                observed=f"a formula that has no value: {error}",
                differing="at least one pair",
            ) from error

    def mismatch(
        self, at: Slice, query: int, key: int, wrong: torch.Tensor, *, expected: str, observed: str, **more: str
    ) -> VerificationMismatch:
        """Make the error. query, key: of a pair that differs, in a slice. wrong: True for all such pairs of the slice."""
        place = at.place(query, key)
        return self._mismatch(
            index=index(place),
            expected=f"{expected} ({elements(self.own, place)})",
            observed=observed,
            differing=f"{int(wrong.sum())} of {wrong.numel()} pairs of its slice",
            **more,
        )

    def _mismatch(self, **found: str) -> VerificationMismatch:
        words = {"site": self.site.module, "what": self.what, "formula": self.formula, "allowed": self.allowed}
        return VerificationMismatch(**(words | found))


def index(place: Sequence[int]) -> str:
    """Return text for people: "b=0, h=1, q=2, k=3"."""
    return ", ".join(f"{name}={i}" for name, i in zip(NAMES, place, strict=True))


def elements(found: list[Own], place: Sequence[int]) -> str:
    """Return the elements of the model's tensors at a pair, for people."""
    return ", ".join(f"{one.term.operand.node.name} holds {one.element(place)}" for one in found)
