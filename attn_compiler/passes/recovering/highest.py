"""Numbers that are added for each key and so far apart that the highest of a row leaves no other key a weight: (1 - mask) · -10000.

A softmax is the same whatever all its scores are raised by. So a row in which every key got -10000 is as if none had. One with keys of 2
beside 1 in its mask has those of 2. Whatever whole numbers a mask holds, the keys with the highest are used, and no others.

Beside numbers like the lowest of a dtype no score counts: (1 - mask) · finfo.min. There 0 is the number of keys that are used. A row
without a 0, or with a higher number, is the softmax over what is added to it: nodes behind the kernel give that. Training keeps such
numbers as they are, since q and k get a gradient from these rows.
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

#: how much of a factor rounding to bfloat16 may take away
_ROUNDED = 1 - 2.0**-7


def leaves_keys(mirror: Mirror, match: Match, reader: Reader) -> bool:
    """Whether the one tensor that is added does so, and nothing else becomes of the scores of a call, which kernels keep in float32."""
    added = None if match.decomposed else _added(mirror, match, reader)
    apart = None if added is None else _apart(added)
    return apart is not None and apart > 2 * of_scores(match) + GONE


def leaves_zeros(mirror: Mirror, match: Match, reader: Reader) -> bool:
    """Whether the one tensor that is added holds whole numbers times a number beside which no score counts: (1 - mask) · lowest.

    Beside a 0, a key that got less has no weight. A row without a 0, or with more than that, is the softmax over what is added to it.
    """
    added = _added(mirror, match, reader)
    factor = None if added is None else _lowest_step(added)
    # One number for all keys of a row chooses none of them, and its tensor has no axis of keys.
    if added is None or factor is None or not ix.mentions(added, Index("k")):
        return False
    (term,) = match.scores.additive
    values = [node.meta["val"] for node in (match.first, term.operand.used)]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.dtype.is_floating_point}
    dtypes = dtypes if match.decomposed else {torch.promote_types(dtype, torch.float32) for dtype in dtypes}
    least = factor * _ROUNDED
    return least > 2 * of_scores(match) + GONE and all(loses_scores(least, dtype) for dtype in dtypes)


def _added(mirror: Mirror, match: Match, reader: Reader) -> Expr | None:
    """The one number for each key that is added to the scores, if nothing else becomes of them."""
    scores = match.scores
    if match.lse is not None or scores.allowed or scores.is_causal or len(scores.additive) != 1:
        return None
    if scores.factors or scores.changes or scores.limits or scores.sinks is not None or scores.masks_weights:
        return None
    (term,) = scores.additive
    within = elements.ranges(match, reader.longer)
    try:
        at = elements.indices(match, term.operand.dims)
        read = reader.read_at(mirror.order(term.operand.used), term.operand.node, at)
        added = ix.decide(divide(read, within), within)
    except (Unreadable, RecursionError):
        return None
    return None if term.weight != 1.0 or any(ix.mentions(added, Index(name)) for name in "hq") else added


def _lowest_step(x: Expr) -> float | None:
    """The size of a finite factor that whole numbers are multiplied by last, as low as numbers that mask; None for anything else."""
    match x:
        case Apply(op="float" | "rounded", args=(a,)):
            return _lowest_step(a)
        case Apply(op="mul", args=(a, Const(value=factor))) if _is_whole(a) and -MASKED_BELOW <= abs(factor) < math.inf:
            return abs(float(factor))
    return None


def _apart(x: Expr) -> float | None:
    """How far apart two numbers are at least, which are not the same; None where that is not known, or where scores are lost in them."""
    match x:
        case Apply(op="float" | "rounded", args=(a,)):
            return _apart(a)
        case Apply(op="where", args=(_, Const(value=a), Const(value=b))) if max(abs(a), abs(b)) < -MASKED_BELOW:
            return abs(float(a) - float(b)) * _ROUNDED
        case Apply(op="mul", args=(a, Const(value=factor))) if _is_whole(a):
            return _step(float(factor))
        case Linear(terms=terms, const=const) if all(ix.kind_of(term) != "float" for term, _ in terms):
            return _step(math.gcd(const, *(factor for _, factor in terms)))
    return None


def _step(factor: float) -> float | None:
    """Of multiples of a factor, each rounded to a number of some dtype: what two differ in is no less than the power of two below it."""
    least = abs(factor) * _ROUNDED
    return 2.0 ** math.floor(math.log2(least)) if least > 1 and abs(factor) < -MASKED_BELOW else None


def _is_whole(x: Expr) -> bool:
    """Whether it is a whole number, also where it is rounded to a dtype of floats."""
    match x:
        case Const(value=value):
            return float(value).is_integer()
        case Apply(op="float" | "rounded", args=(a,)):
            return ix.kind_of(a) != "float" or _is_whole(a)
        case Apply(op="add" | "mul", args=(a, b)) | Apply(op="where", args=(_, a, b)):
            return _is_whole(a) and _is_whole(b)
    return ix.kind_of(x) != "float"
