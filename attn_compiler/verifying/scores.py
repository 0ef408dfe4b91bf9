"""What is added to the scores, as it was proved, against what the model adds: their sum at every (b, h, q, k) that is not masked.

What is allowed is rounding, in each batch row and head: the model rounds after each of its operations, and the kinds' expressions
are evaluated in float64. Numbers that are cut off to whole ones (T5's buckets) may fall on the other side of a boundary that
they are as near to. Elements that mask are the mask's (masks.py).
"""

from __future__ import annotations

from functools import reduce

import torch

from attn_compiler.index_expr import Apply, Expr, parts
from attn_compiler.passes.graph.site import Site
from attn_compiler.verifying import pairs, rounding
from attn_compiler.verifying.comparing import Compared
from attn_compiler.verifying.numbers import difference
from attn_compiler.verifying.pairs import BIASED_MASKED_BELOW, MASKED, Recovered, Slice
from attn_compiler.verifying.values import Key, NoValueError, Values


def needs(site: Site, values: Values) -> set[Key]:
    """What has to be recorded for `check_biases`. Raises NoValueError where it can't be."""
    return pairs.needs(site, [(kind.summand, site.score_loads) for kind in pairs.biases(site)], values)


def words(site: Site) -> str | None:
    """What was proved, for people."""
    return site.spec.score.added if site.spec is not None else None


def check_biases(site: Site, values: Values) -> Compared:
    """Compare, slice by slice. Raises VerificationMismatch, or NoValueError."""
    summands = [kind.summand for kind in pairs.biases(site)]
    if not site.added:
        raise NoValueError("the model adds no tensor")
    said = {
        "what": "recovered bias",
        "formula": str(words(site)),
        "gives": "numbers that are added",
        "allowed": "rounding",
    }
    added = Recovered.of(site, values, summands, site.score_loads, **said)
    relative = rounding.relative(site, values)
    worst = Compared(elements=0, error=0.0, allowed=0.0)
    for at in added.slices():
        worst = _worse(worst, _compared(at, added, summands, relative))
    return worst


def _worse(a: Compared, b: Compared) -> Compared:
    """The numbers of the slice that comes nearer to its limit, and the elements of both."""
    nearer = b if b.error * a.allowed >= a.error * b.allowed else a
    return Compared(elements=a.elements + b.elements, error=nearer.error, allowed=nearer.allowed)


def _cuts_off(x: Expr) -> bool:
    return (isinstance(x, Apply) and x.op == "int") or any(map(_cuts_off, parts(x)))


def _compared(at: Slice, added: Recovered, summands: list[Expr], relative: float) -> Compared:
    here = [one.at(at) for one in added.own]
    size = (1, 1, at.end - at.first, added.sizes[3])
    kept = (pairs.together([pairs.effects(one, BIASED_MASKED_BELOW) for one in here]) != MASKED).expand(size)
    terms = [one.x.to(torch.float64) * one.term.weight for one in here if one.adds]
    exact = reduce(torch.add, terms).expand(size)
    allowed = relative * max(_largest(x.expand(size), kept) for x in terms)

    def total(nudge: float) -> torch.Tensor:
        """What the kinds add together, float64."""
        found = [added.on(x, at, exact.device, nudge=nudge) for x in summands]
        return sum(found, exact.new_zeros(())).expand(exact.shape)

    def off(nudge: float) -> torch.Tensor:
        return torch.where(kept, difference(total(nudge), exact), 0.0)

    error = off(0.0)
    for nudge in (relative, -relative) if any(map(_cuts_off, summands)) and bool((error > allowed).any()) else ():
        error = torch.minimum(error, off(nudge))
    found = float(error.max()) if error.numel() else 0.0
    if not found <= allowed:
        place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        ours, theirs = (f"{x[place].item():.6g}" for x in (total(0.0), exact))
        words = {"expected": theirs, "observed": ours, "allowed": f"a difference of {allowed:.3g}"}
        raise added.mismatch(at, place[2], place[3], error > allowed, **words)
    return Compared(elements=int(kept.sum()), error=found, allowed=allowed)


def _largest(x: torch.Tensor, kept: torch.Tensor) -> float:
    counts = kept & x.isfinite()
    return float(torch.where(counts, x.abs(), 0.0).max()) if x.numel() else 0.0
