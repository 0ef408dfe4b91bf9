"""What is added to the scores, as it was proved, against what the model adds: their sum at every (b, h, q, k) that is not masked.

What is allowed is rounding, in each batch row and head: the model rounds after each of its operations, and the kinds' expressions
are evaluated in float64. Numbers that are cut off to whole ones (T5's buckets) may fall on the other side of a boundary that
they are as near to. Elements that mask are the mask's (masks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

from attn_compiler.index_expr import Apply, Expr, parts
from attn_compiler.passes.graph.site import Site
from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying import pairs, rounding
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.numbers import difference
from attn_compiler.verifying.pairs import BIASED_MASKED_BELOW, MASKED, Own, Slice
from attn_compiler.verifying.values import Key, NoValueError, Values


def needs(site: Site, values: Values) -> set[Key]:
    """What has to be recorded for `check`. Raises NoValueError where it can't be."""
    return pairs.needs(site, [(kind.summand, site.score_loads) for kind in pairs.biases(site)], values)


def words(site: Site) -> str | None:
    """What was proved, for people."""
    return site.spec.score.added if site.spec is not None else None


def check(site: Site, values: Values) -> Compared:
    """Compare, slice by slice. Raises VerificationMismatch, or NoValueError."""
    summands = [kind.summand for kind in pairs.biases(site)]
    own = pairs.own(site, values)
    if not any(one.adds for one in own):
        raise NoValueError("the model adds no tensor")
    sizes = pairs.varying(summands, own, pairs.shape(site.match, values))
    added = _Added(site, summands, values, sizes[3], pairs.loaded(summands, site.score_loads, values))
    relative = rounding.relative(site, values)
    worst = Compared(elements=0, error=0.0, allowed=0.0)
    for at in pairs.slices(sizes):
        worst = _worse(worst, _compared(site, at, own, added, relative))
    return worst


def _worse(a: Compared, b: Compared) -> Compared:
    """The numbers of the slice that comes nearer to its limit, and the elements of both."""
    nearer = b if b.error * a.allowed >= a.error * b.allowed else a
    return Compared(elements=a.elements + b.elements, error=nearer.error, allowed=nearer.allowed)


@dataclass(frozen=True)
class _Added:
    """What the kinds add together."""

    site: Site
    summands: list[Expr]
    values: Values
    keys: int
    tensors: dict[str, torch.Tensor]

    def on(self, at: Slice, device: torch.device, nudge: float) -> torch.Tensor:
        """Their sum on a slice, float64, broadcasts to (queries, keys). Raises VerificationMismatch if it has no value."""
        try:
            found = [
                pairs.evaluated(x, at, self.keys, self.values, self.tensors, device, nudge=nudge) for x in self.summands
            ]
        except (IndexError, ZeroDivisionError) as error:
            raise _undefined(self.site, at, error) from error
        return sum(found, torch.zeros((), dtype=torch.float64, device=device))

    @property
    def cuts_off(self) -> bool:
        return any(map(_cuts_off, self.summands))


def _cuts_off(x: Expr) -> bool:
    return (isinstance(x, Apply) and x.op == "int") or any(map(_cuts_off, parts(x)))


def _compared(site: Site, at: Slice, own: list[Own], added: _Added, relative: float) -> Compared:
    here = [one.at(at) for one in own]
    size = (1, 1, at.end - at.first, added.keys)
    kept = (pairs.together([pairs.effects(one, BIASED_MASKED_BELOW) for one in here]) != MASKED).expand(size)
    terms = [one.x.to(torch.float64) * one.term.weight for one in here if one.adds]
    exact = reduce(torch.add, terms).expand(size)
    allowed = relative * max(_largest(x.expand(size), kept) for x in terms)
    error = _error(at, exact, kept, added, nudge=0.0)
    for nudge in (relative, -relative) if added.cuts_off and bool((error > allowed).any()) else ():
        error = torch.minimum(error, _error(at, exact, kept, added, nudge=nudge))
    found = float(error.max()) if error.numel() else 0.0
    if not found <= allowed:
        raise _mismatch(site, at, own, exact, error, added, allowed)
    return Compared(elements=int(kept.sum()), error=found, allowed=allowed)


def _error(at: Slice, exact: torch.Tensor, kept: torch.Tensor, added: _Added, *, nudge: float) -> torch.Tensor:
    """|ours - the model's| where the pair is kept, else 0."""
    return torch.where(kept, difference(added.on(at, exact.device, nudge).expand(exact.shape), exact), 0.0)


def _largest(x: torch.Tensor, kept: torch.Tensor) -> float:
    counts = kept & x.isfinite()
    return float(torch.where(counts, x.abs(), 0.0).max()) if x.numel() else 0.0


def _undefined(site: Site, at: Slice, error: Exception) -> VerificationMismatch:
    return VerificationMismatch(
        site=site.module,
        what="recovered bias",
        formula=str(words(site)),
        index=str(at),
        expected="numbers that are added",
        observed=f"a formula that has no value: {error}",
        allowed="rounding",
        differing="at least one pair",
    )


def _mismatch(
    site: Site, at: Slice, own: list[Own], exact: torch.Tensor, error: torch.Tensor, added: _Added, allowed: float
) -> VerificationMismatch:
    _, _, query, key = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    place = at.place(query, key)
    ours = added.on(at, exact.device, 0.0).expand(exact.shape)[0, 0, query, key]
    return VerificationMismatch(
        site=site.module,
        what="recovered bias",
        formula=str(words(site)),
        index=pairs.index(place),
        expected=f"{exact[0, 0, query, key].item():.6g} ({pairs.elements(own, place)})",
        observed=f"{ours.item():.6g}",
        allowed=f"a difference of {allowed:.3g}",
        differing=f"{int((error > allowed).sum())} of {error.numel()} pairs of its slice",
    )
