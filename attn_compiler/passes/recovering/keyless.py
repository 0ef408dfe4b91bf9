"""Output of queries whose keys are all masked.

A softmax over equal scores, however low, weighs all keys alike: the row is the mean of v. Kernels skip such a row and return 0. Some models
read it: an empty prompt is a batch row of cross attention, DeBERTa masks padding along the queries, too, and an indexer looks at padding.
So a row gets the result of the model's own softmax. With -inf and SDPA's truth values, PyTorch decides such a row: it is 0 here.

`of` derives the model's result from its masking steps and their order. `keyless_nodes.py` makes the nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Linear, Load, Ranges, Size, Test
from attn_compiler.passes.graph.site import Keyless

Q, K = Index("q"), Index("k")

#: assumed bound of scores that a masking number is added to: float32 rounds smaller ones away at -1e9
_SCORES = 16.0
#: the most steps that are tried in all combinations
_MOST = 6
#: numbers that are further apart have softmax weights 0 and 1
_APART = 110.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskStep:
    """One masking step.

    allowed: true where the step does not mask; None if that was not read.
    fills: the numbers that it masks with.
    replaces: the fills replace the scores; else they are added to them.
    added: the whole added term over (b, h, q, k), if several of the fills may add up.
    again: the weights of the pairs that it masks are set to zero, too.
    """

    allowed: Expr | None
    fills: frozenset[float]
    replaces: bool
    added: Expr | None = None
    again: bool = False

    @property
    def outcomes(self) -> tuple[float, ...]:
        """Numbers that a masked pair may get."""
        found = set(self.fills)
        if self.added is not None:
            found |= {a + b for a in self.fills for b in self.fills}
        return tuple(sorted(found))


def shuts_queries_out(keyless: Keyless | None) -> bool:
    """True if a condition on the query alone masks all its keys. A model may well read such rows."""
    if keyless is None or keyless.allowed is None:
        return False
    found = keyless.allowed
    parts = found.args if isinstance(found, ix.Apply) and found.op == "and" else (found,)
    return any(not ix.mentions(part, K) for part in parts)


def of(
    steps: Sequence[MaskStep], dtype: torch.dtype, within: Ranges, *, square: bool, low: float = -math.inf
) -> Keyless | None:
    """Return the output of rows without keys. None: each row has keys, or 0 or PyTorch's own result stands.

    steps: all masking steps, in the model's order.
    dtype: the dtype of the scores.
    within: ranges of the indices.
    square: there are as many queries as keys.
    low: the lower limit of the final scores.
    """
    finite = [max(fill, low) for step in steps for fill in step.fills if math.isfinite(max(fill, low))]
    known = [step.allowed for step in steps if step.allowed is not None]
    allowed = ix.apply("and", *known) if len(known) == len(steps) else None
    if not finite or (allowed is not None and _has_keys(allowed, within, square=square)):
        return None
    if all(step.again or not any(math.isfinite(max(fill, low)) for fill in step.fills) for step in steps):
        return None
    highest = max(finite)
    if any(step.again for step in steps):
        return Keyless(allowed=allowed, highest=highest, own="weights are set to zero by some of the masks only")
    found = _outcomes(steps, dtype, low)
    if isinstance(found, str):
        return Keyless(allowed=allowed, highest=highest, through=True, own=found)
    added = {is_added for number, is_added in found if math.isfinite(number)}
    through, partly = True in added, len(added) > 1
    numbers = {number for number, _ in found}
    if len(numbers) == 1:
        return Keyless(allowed=allowed, highest=highest, through=through, partly=partly)
    if allowed is None:
        return Keyless(allowed=None, highest=highest, through=through, own="a mask of several numbers was not read")
    return Keyless(allowed=allowed, highest=highest, numbers=_numbers(steps, low), through=through)


# ---- scores of masked pairs ---------------------------------------------------------------------------------------


def _outcomes(steps: Sequence[MaskStep], dtype: torch.dtype, low: float) -> set[tuple[float, bool]] | str:
    """Return (number, score is in it) for each combination of steps that mask a pair; the reason if that is unknown."""
    if len(steps) > _MOST or any(len(step.fills) > 1 and step.added is None for step in steps):
        return "a pair may be masked by one of several numbers"
    found: set[tuple[float, bool]] = set()
    for chosen in itertools.product(*((None, *step.outcomes) for step in steps)):
        masking = [(step, fill) for step, fill in zip(steps, chosen, strict=True) if fill is not None]
        if masking:
            number, is_added = _outcome(masking, dtype)
            found.add((max(number, low), is_added))
    for number, is_added in found:
        if is_added and math.isfinite(number) and not loses_scores(number, dtype):
            return f"a score is not lost beside {number:g} in {dtype}"
    apart = sorted({number for number, _ in found if math.isfinite(number)})
    if any(high - low < _APART for low, high in itertools.pairwise(apart)):
        return "numbers that mask are near to each other"
    return found


def _outcome(masking: Iterable[tuple[MaskStep, float]], dtype: torch.dtype) -> tuple[float, bool]:
    number, is_added = 0.0, True
    for step, fill in masking:
        total = fill if step.replaces else number + fill
        number, is_added = float(torch.tensor(total, dtype=torch.float64).to(dtype)), is_added and not step.replaces
    return number, is_added


def loses_scores(number: float, dtype: torch.dtype) -> bool:
    """True if a score of that dtype is rounded away when a finite number is added to it.

    A score below half the distance to the next number towards 0 is.
    """
    _, exponent = math.frexp(abs(number))
    return math.ldexp(torch.finfo(dtype).eps, exponent - 2) >= _SCORES


def _numbers(steps: Sequence[MaskStep], low: float) -> Expr:
    """Return the number of a masked pair, without its score."""
    total: Expr = Const(0.0)
    for step in steps:
        if step.added is not None:
            total = ix.add(total, step.added)
            continue
        (fill,) = step.fills
        masked = Const(fill) if step.replaces else ix.add(total, Const(fill))
        total = total if step.allowed is None else ix.where(step.allowed, total, masked)
    return total if low == -math.inf else ix.apply("max", total, Const(low))


# ---- rows that surely have a key ----------------------------------------------------------------------------------


def _has_keys(allowed: Expr, within: Ranges, *, square: bool) -> bool:
    """True if every query may use the first key or, with as many keys as queries, the key at its own position."""
    if allowed == ix.TRUE:
        return True
    places: list[Expr] = [ix.ZERO, *([Q] if square else [])]
    return any(_holds(ix.decide(ix.substitute(allowed, K, place), within)) for place in places)


def _holds(x: Expr) -> bool:
    """True if a condition holds, on the assumption that loaded integers that bound keys are positions, and so at least 0."""
    if isinstance(x, ix.Apply) and x.op == "and":
        return all(_holds(part) for part in x.args)
    return x == ix.TRUE or (isinstance(x, Test) and x.relation == ">=" and _is_position(x.form))


def _is_position(form: Linear) -> bool:
    at_least_0 = (Index, Size, Load)
    return form.const >= 0 and all(factor > 0 and isinstance(term, at_least_0) for term, factor in form.terms)
