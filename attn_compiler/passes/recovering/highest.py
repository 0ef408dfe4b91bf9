"""Numbers added per key, so far apart that the keys with the highest number of a row get all the weight: (1 - mask) · -10000.

A softmax does not change if all its scores are shifted. So a row in which every key got -10000 is unmasked. A row with 2 and 1 in its mask
uses the keys with 2. Whatever integers a mask holds, the keys with the highest number are used, and no others.

Numbers like the lowest of a dtype round scores away: (1 - mask) · finfo.min. There the keys with 0 are used. A row without a 0, or with a
higher number, is the softmax over the added numbers: nodes behind the kernel compute that. Training keeps such numbers as they are, since
q and k get a gradient from these rows.
"""

from __future__ import annotations

import math

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear
from attn_compiler.index_expr.dividing import divide
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW
from attn_compiler.passes.recovering import elements
from attn_compiler.passes.recovering.keyless import loses_scores
from attn_compiler.passes.recovering.reading import Reader, Unreadable
from attn_compiler.passes.spelling.fills import GONE, of_scores

#: the share of a factor that is surely left after rounding to bfloat16
_ROUNDED = 1 - 2.0**-7


def leaves_keys(mirror: Mirror, match: Match, reader: Reader) -> bool:
    """True if the one tensor added in a call has such numbers, and nothing else changes the scores, which kernels keep in float32."""
    added = None if match.decomposed else _added(mirror, match, reader)
    apart = None if added is None else _apart(added)
    return apart is not None and apart > 2 * of_scores(match) + GONE


def leaves_zeros(mirror: Mirror, match: Match, reader: Reader) -> bool:
    """True if the one added tensor holds integers times a number that rounds all scores away: (1 - mask) · lowest.

    In a row with a 0, keys with less get no weight. A row without a 0, or with more than 0, is the softmax over the added numbers.
    """
    added = _added(mirror, match, reader)
    factor = None if added is None else _lowest_step(added)
    # One number for all keys of a row selects none of them, and its tensor has no key axis.
    if added is None or factor is None or not ix.mentions(added, Index("k")):
        return False
    (term,) = match.scores.additive
    values = [node.meta["val"] for node in (match.first, term.operand.used)]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.dtype.is_floating_point}
    dtypes = dtypes if match.decomposed else {torch.promote_types(dtype, torch.float32) for dtype in dtypes}
    least = factor * _ROUNDED
    return least > 2 * of_scores(match) + GONE and all(loses_scores(least, dtype) for dtype in dtypes)


def _added(mirror: Mirror, match: Match, reader: Reader) -> Expr | None:
    """Return the number that is added to the scores for each key, if nothing else changes them; else None."""
    scores = match.scores
    if match.lse is not None or scores.allowed or scores.is_causal or len(scores.additive) != 1:
        return None
    if scores.factors or scores.changes or scores.limits or scores.sinks is not None:
        return None
    (term,) = scores.additive
    within = elements.ranges(match, reader.longer)
    try:
        at = elements.indices(match, term.operand.dims)
        read = reader.read_at(mirror.order(term.operand.used), term.operand.node, at)
        added = ix.decide(divide(read, within), within)
    except (Unreadable, RecursionError):
        return None
    return None if term.weight != 1.0 or ix.mentions(added, *map(Index, "hq")) else added


def _lowest_step(x: Expr) -> float | None:
    """Return the absolute value of the last factor of integers, if it is finite and as large as numbers that mask; else None."""
    match x:
        case Apply(op="float" | "rounded", args=(a,)):
            return _lowest_step(a)
        case Apply(op="mul", args=(a, Const(value=factor))) if _is_whole(a) and -MASKED_BELOW <= abs(factor) < math.inf:
            return abs(float(factor))
    return None


def _apart(x: Expr) -> float | None:
    """Return the least distance of two different numbers; None if it is unknown, or if the numbers round scores away."""
    match x:
        case Apply(op="float" | "rounded", args=(a,)):
            return _apart(a)
        case Apply(op="where", args=(_, Const(value=a), Const(value=b))) if max(abs(a), abs(b)) < -MASKED_BELOW:
            return abs(float(a) - float(b)) * _ROUNDED
        case Apply(op="mul", args=(a, Const(value=factor))) if _is_whole(a):
            return _least_spacing(float(factor))
        case Linear(terms=terms, const=const) if all(ix.kind_of(term) != "float" for term, _ in terms):
            return _least_spacing(math.gcd(const, *(factor for _, factor in terms)))
    return None


def _least_spacing(factor: float) -> float | None:
    """Return a power of two that two multiples of a factor, rounded to any dtype, differ by at least; None if the factor itself masks."""
    least = abs(factor) * _ROUNDED
    return 2.0 ** math.floor(math.log2(least)) if least > 1 and abs(factor) < -MASKED_BELOW else None


def _is_whole(x: Expr) -> bool:
    """True if x is an integer, or an integer rounded to a float dtype."""
    match x:
        case Const(value=value):
            return float(value).is_integer()
        case Apply(op="float" | "rounded", args=(a,)):
            return ix.kind_of(a) != "float" or _is_whole(a)
        case Apply(op="add" | "mul", args=(a, b)) | Apply(op="where", args=(_, a, b)):
            return _is_whole(a) and _is_whole(b)
    return ix.kind_of(x) != "float"
