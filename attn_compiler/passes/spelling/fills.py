"""When a number shuts a key out: beside a key that has not got it, no weight is left. Else it stays a number that is added.

Numbers that are known while compiling count with all that they can be, what is read at run time as a truth value, or as a part of the
scores (index_expr/reach.py). Scores are taken to stay below PRODUCT times their scale. docs/numbers.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from attn_compiler.index_expr.reach import Reach
from attn_compiler.passes.graph.site import Match
from attn_compiler.spec.dtypes import EVERY
from attn_compiler.spec.scores import pointwise

#: real products q·k, before any scale, are taken to be below this; nobody's are near, and float16 overflows at four times as much
PRODUCT = 2.0**14

#: float32 has no exponential of less than minus this, and what float64 has is lost beside any other weight
GONE = 110.0

#: lowest numbers of dtypes, also where they were scaled
_AS_LOW = -1e30
_LOWEST = frozenset(torch.finfo(d).min for d in EVERY)


def of_scores(match: Match) -> float:
    """How large the scores of a match get before anything is added."""
    change = pointwise(match.scores.changes)
    return PRODUCT * abs(match.scores.scale) if change is None else change.most


def shuts_out(fills: Iterable[float], added: Reach, scores: float) -> bool:
    """Whether a key that got any of these numbers has no weight beside one that got none, whatever else both got.

    Fills of two sizes are none: of a row in which every key got one, the higher ones would have all the weight. Only between lowest
    numbers of dtypes that makes no difference to anybody: such a row is padding, and gets nothing.
    """
    found = frozenset(fills)
    highest = max(found, default=-math.inf)
    if not highest + added.high + scores < added.low - scores - GONE:
        return not found
    finite = {fill for fill in found if math.isfinite(fill)}
    return len(finite) < 2 or all(fill in _LOWEST or fill <= _AS_LOW for fill in finite)


def unusual(match: Match, fills: Iterable[float], added: Reach) -> tuple[str, ...]:
    """What happens to the scores that has no kind: fills that do not shut out, clamps that change a number.

    fills: of everything that masks, each of which shuts out by itself. added: all else that is added, together.
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
