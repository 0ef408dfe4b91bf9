"""Rule for fills: a number masks a key if it leaves no weight beside a key without it. Any other number is a bias.

Compile-time numbers count with their whole range of values. Run-time values count as a bool, or as part of the scores
(index_expr/reach.py). Scores are assumed to stay below PRODUCT times their scale. docs/numbers.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from attn_compiler.index_expr.reach import Reach
from attn_compiler.passes.graph.site import Match
from attn_compiler.spec.dtypes import EVERY
from attn_compiler.spec.scores import pointwise

#: assumed bound of real products q·k before any scale: no model is near it, and float16 overflows at four times as much
PRODUCT = 2.0**14

#: float32 has no exponential below minus this; a float64 one is lost beside any other weight
GONE = 110.0

#: lowest numbers of dtypes, also after scaling
_AS_LOW = -1e30
_LOWEST = frozenset(torch.finfo(d).min for d in EVERY)


def of_scores(match: Match) -> float:
    """Return a bound of a match's scores before anything is added."""
    change = pointwise(match.scores.changes)
    return PRODUCT * abs(match.scores.scale) if change is None else change.most


def shuts_out(fills: Iterable[float], added: Reach, scores: float) -> bool:
    """Return whether a key with any of these fills has no weight beside a key without, whatever else is added to both.

    Fills of two sizes do not mask: in a row where every key has one, the higher ones would have all the weight. The lowest numbers of
    dtypes may differ, because such a row is padding, and gets nothing.
    """
    found = frozenset(fills)
    highest = max(found, default=-math.inf)
    if not highest + added.high + scores < added.low - scores - GONE:
        return not found
    finite = {fill for fill in found if math.isfinite(fill)}
    return len(finite) < 2 or all(fill in _LOWEST or fill <= _AS_LOW for fill in finite)


def unusual(match: Match, fills: Iterable[float], added: Reach) -> tuple[str, ...]:
    """Describe score changes that have no kind: fills that do not mask, and clamps that change a number.

    fills: of all masks, each of which masks by itself. added: the range of everything else that is added, together.
    """
    found, scores = set(fills), of_scores(match)
    lows = [limit.low for limit in match.scores.limits]
    risen = {max(fill, *lows) for fill in found} if lows else found
    beside = f"scores up to {scores:g}"
    beside += f" and {added.low:g} … {added.high:g} that is added" if added != Reach() else ""
    numbers = ", ".join(f"{fill:g}" for fill in sorted(risen))
    undone = [] if shuts_out(risen, added, scores) else [f"masks by {numbers} beside {beside}"]
    passed = [limit for limit in match.scores.limits if not limit.is_idle(added.low - scores, added.high + scores)]
    return (*undone, *(f"a clamp to {limit.low:g} … {limit.high:g} of {beside}" for limit in passed))
