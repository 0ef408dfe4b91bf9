"""The recovered mask against the model's own: the condition at every (b, h, q, k), and the tensors that the model masks with.

What is allowed: no difference at all. Where the condition holds, the model must let the pair through (True, or 0 added), and
where it does not, the model must mask it (False, or at most float16's lowest number added). A number between is neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.errors import VerificationMismatch
from attn_compiler.index_expr import Expr, Index
from attn_compiler.index_expr.on_tensors import evaluate_on
from attn_compiler.passes import axes
from attn_compiler.passes.arrange import arrange, simplified
from attn_compiler.passes.axes import AxisError
from attn_compiler.passes.patterns.score_steps import MASKED_BELOW, STILL_MASKED_BELOW
from attn_compiler.passes.site import Match, Site, Term
from attn_compiler.verifying.values import Key, NoValueError, Values

#: pairs of one slice: what is evaluated at once, in int64
MOST_PAIRS = 2**24

#: what the model does with a pair
MASKED, ALLOWED, NEITHER = 0, 1, 2
_WORDS = {MASKED: "masked out", ALLOWED: "allowed"}
_NAMES = ("b", "h", "q", "k")


def needs(site: Site, values: Values) -> set[Key]:
    """What has to be recorded for `check`. Raises NoValueError where it can't be."""
    if site.condition is None:
        mask = site.spec.mask if site.spec is not None else None
        raise NoValueError((mask.reason if mask is not None else None) or "more is added to the scores than what masks")
    nodes = [term.operand.node for term in site.mask_terms]
    nodes += [_loaded(site, load.tensor) for load in ix.loads(site.condition)]
    return set().union(*(values.needs(node) for node in nodes))


def _loaded(site: Site, tensor: str) -> fx.Node:
    if tensor not in site.loads:
        raise NoValueError(f"where {tensor} is read from is not known")
    return site.loads[tensor]


def shape(match: Match, values: Values) -> tuple[int, ...]:
    """(B, Hq, Sq, Skv) as numbers."""
    return tuple(values.size(axes.dim_size(dim)) for dim in (match.batch, match.heads, match.query, match.key))


def arranged(match: Match, term: Term, values: Values) -> torch.Tensor:
    """What the model masks with, as a tensor that broadcasts to (B, Hq, Sq, Skv). Raises NoValueError."""
    operand = term.operand
    reads = {atom: atom for atom in axes.flat(operand.dims)}
    try:
        recipe = simplified(
            arrange(operand.dims, reads, (match.batch, match.heads, match.query, match.key), broadcast=True)
        )
    except AxisError as error:
        raise NoValueError(f"{operand.node.name} can't be brought into (b, h, q, k): {error}") from error
    return _as_tensor(recipe.run(values.mirror(operand.node), _call, values.size))


def _call(function: Any, x: torch.Tensor, *args: Any) -> Any:
    return function(x, *args)


def _as_tensor(x: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or x.dim() != len(_NAMES):
        raise NoValueError("a mask is no tensor over (b, h, q, k)")
    return x


def effects(x: torch.Tensor, term: Term) -> torch.Tensor:
    """What the model does with each pair by one term: MASKED, ALLOWED or NEITHER, as int8."""
    if x.dtype == torch.bool:
        return (x ^ term.inverted).to(torch.int8)
    masked = (x <= MASKED_BELOW) & (x * term.weight <= STILL_MASKED_BELOW)
    return torch.where(masked, MASKED, torch.where(x == 0, ALLOWED, NEITHER)).to(torch.int8)


def together(parts: list[torch.Tensor]) -> torch.Tensor:
    """What several terms do together: one that masks is enough."""
    result = parts[0]
    for part in parts[1:]:
        either = torch.maximum(result, part)
        result = torch.where((result == MASKED) | (part == MASKED), MASKED, either).to(torch.int8)
    return result


def rows_with_keys(site: Site, values: Values) -> torch.Tensor | None:
    """Which rows have any key that is not masked: bool, broadcasts to (B, Hq, Sq, 1). None if no mask term is known."""
    if not site.mask_terms:
        return None
    rows = None
    own = [(arranged(site.match, term, values), term) for term in site.mask_terms]
    full = tuple(max(sizes) for sizes in zip(*(x.shape for x, _ in own), strict=True))
    for at in _slices(full):
        part = together([effects(_sliced(x, at), term) for x, term in own]) != MASKED
        if rows is None:
            rows = torch.empty(*full[:3], 1, dtype=torch.bool, device=part.device)
        _sliced(rows, at).copy_(part.any(-1, keepdim=True))
    return rows


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """One batch row, one head, and queries from `first` up to `end`."""

    b: int
    h: int
    first: int
    end: int


def _slices(sizes: tuple[int, ...]) -> Iterator[_Slice]:
    step = max(1, MOST_PAIRS // max(1, sizes[3]))
    for b, h, first in itertools.product(range(sizes[0]), range(sizes[1]), range(0, sizes[2], step)):
        yield _Slice(b=b, h=h, first=first, end=min(first + step, sizes[2]))


def _sliced(x: torch.Tensor, at: _Slice) -> torch.Tensor:
    """(1, 1, queries or 1, keys or 1)"""
    for dim, (start, end) in enumerate(((at.b, at.b + 1), (at.h, at.h + 1), (at.first, at.end))):
        if x.shape[dim] != 1:
            x = x[(slice(None),) * dim + (slice(start, end),)]
    return x


def check(site: Site, values: Values) -> int:
    """Compare, slice by slice; returns how many pairs were. Raises VerificationMismatch, or NoValueError."""
    condition = site.condition
    if condition is None:
        raise NoValueError("the mask was not read")
    own = [(arranged(site.match, term, values), term) for term in site.mask_terms]
    if not own:
        raise NoValueError("the model masks with no tensor")
    tensors = {load.tensor: _tensor(values, _loaded(site, load.tensor)) for load in ix.loads(condition)}
    sizes = _varying(condition, [x for x, _ in own], shape(site.match, values))
    for at in _slices(sizes):
        expected = together([effects(_sliced(x, at), term) for x, term in own])
        try:
            got = _evaluated(condition, at, sizes[3], values, tensors, expected.device)
        except (IndexError, ZeroDivisionError) as error:
            raise _undefined(site, at, error) from error
        differs = (expected != got).broadcast_to(1, 1, at.end - at.first, sizes[3])
        if bool(differs.any()):
            raise _mismatch(site, at, expected, differs, own)
    return sizes[0] * sizes[1] * sizes[2] * sizes[3]


def _tensor(values: Values, node: fx.Node) -> torch.Tensor:
    value = values.mirror(node)
    if not isinstance(value, torch.Tensor):
        raise NoValueError(f"{node.name} is no tensor")
    return value


def _varying(condition: Expr, own: list[torch.Tensor], full: tuple[int, ...]) -> tuple[int, ...]:
    """The part of (B, Hq, Sq, Skv) to look at: one index is enough along an axis that changes neither side."""
    return tuple(
        size if ix.mentions(condition, Index(name)) or any(x.shape[dim] != 1 for x in own) else min(size, 1)
        for dim, (name, size) in enumerate(zip(_NAMES, full, strict=True))
    )


def _evaluated(
    condition: Expr,
    at: _Slice,
    keys: int,
    values: Values,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """The condition on a slice: int8, MASKED or ALLOWED."""
    grid: dict[str, int | torch.Tensor] = {
        **values.symbols,
        "b": torch.tensor(at.b, device=device),
        "h": torch.tensor(at.h, device=device),
        "q": torch.arange(at.first, at.end, device=device)[:, None],
        "k": torch.arange(keys, device=device),
    }
    try:
        return evaluate_on(condition, grid, tensors).to(torch.int8)
    except KeyError as error:
        raise NoValueError(f"the size {error} is not known on the first call") from error
    except NotImplementedError as error:
        raise NoValueError(str(error)) from error


def _undefined(site: Site, at: _Slice, error: Exception) -> VerificationMismatch:
    return VerificationMismatch(
        site=site.module,
        what="recovered mask",
        formula=formula(site),
        index=f"b={at.b}, h={at.h}, q from {at.first} up to {at.end}",
        expected="a mask",
        observed=f"a formula that has no value: {error}",
        allowed="no difference",
        differing="at least one pair",
    )


def formula(site: Site) -> str:
    """The recovered condition in words."""
    return "(not read)" if site.condition is None else ix.text(site.condition)


def _mismatch(
    site: Site,
    at: _Slice,
    expected: torch.Tensor,
    differs: torch.Tensor,
    own: list[tuple[torch.Tensor, Term]],
) -> VerificationMismatch:
    query, key = (int(i) for i in differs[0, 0].nonzero()[0])
    place = (at.b, at.h, at.first + query, key)
    effect = int(expected.expand_as(differs)[0, 0, query, key])
    elements = ", ".join(f"{term.operand.node.name} holds {_element(x, place)}" for x, term in own)
    recovered = ALLOWED if effect == MASKED else MASKED if effect == ALLOWED else None
    return VerificationMismatch(
        site=site.module,
        what="recovered mask",
        formula=formula(site),
        index=", ".join(f"{name}={i}" for name, i in zip(_NAMES, place, strict=True)),
        expected=f"{_WORDS.get(effect, 'neither allowed nor masked out')} ({elements})",
        observed=_WORDS[recovered] if recovered is not None else "a condition, which allows or masks out",
        allowed="no difference",
        differing=f"{int(differs.sum())} of {differs.numel()} pairs of its slice",
    )


def _element(x: torch.Tensor, place: tuple[int, ...]) -> Any:
    return x[tuple(i if size != 1 else 0 for i, size in zip(place, x.shape, strict=True))].item()
