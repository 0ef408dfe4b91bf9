"""Results against the model's own: FlashAttention's rule, with as many runs of the model's own math as it takes.

Most results are within the rounding of their dtype, and the model's own run decides. Else the exact ones are made, and the result
may be off from them by twice what the model's own is off by (three times with a softcap). Else it is asked how far other roundings of the
same math come, times the same factor (interpreting.py). Only that tells of sums in which everything cancels out, and of what is
decided on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.verifying.numbers import FLOOR_ULPS, Noise, difference, exact_dtype, largest

#: of the rule, and of the rule at a site with a softcap
FACTOR, FACTOR_SOFTCAP = 2.0, 3.0
#: runs with noise before a difference is taken to be one
NOISY_RUNS = 4
#: so many where roundings move a result by a twentieth of it, as those of a steep softmax do: few runs come near to the largest error
NOISY_RUNS_OF_STEEP = 16
STEEP = 0.05
#: the share of a rounding below which an exact result is zero, but for its own rounding
_NOTHING = 1e-6

#: The model's own results in wider numbers: exact ones without noise, else with noise on each step
Run = Callable[[Noise | None], Sequence[torch.Tensor | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """elements: how many. error: the largest difference. allowed: its limit. left_out: there are others, which differ and may."""

    elements: int
    error: float
    allowed: float
    left_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is allowed. rounded: the coarsest dtype on the way to the results. beside: other numbers that they are computed from, as
    large as what may cancel out. weighted: the largest number that a result is a mean of, if it is one. A mean is always held against the
    exact one. kept: the elements that count, None: all."""

    factor: float = FACTOR
    rounded: torch.dtype | None = None
    beside: Sequence[torch.Tensor] = ()
    weighted: float | None = None
    kept: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A result that is not right. index: which one. place: its worst element; expected, exact, observed: there."""

    index: int
    place: tuple[int, ...]
    expected: str
    observed: str
    allowed: str
    differing: str

    @property
    def where(self) -> str:
        return str(list(self.place)) if self.place else "every element"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """compared: of all results together, by the one that came nearest to its limit. differences: what is wrong."""

    compared: Compared
    differences: Sequence[Difference]

    def required(self, names: Callable[[], Sequence[str]], *, site: str, formula: str) -> Compared:
        """What was compared. Raises VerificationMismatch for the first difference; notes name the others. names: of all results."""
        if not self.differences:
            return self.compared
        first, *others = self.differences
        named = names()
        error = VerificationMismatch(
            site=site,
            what=named[first.index],
            formula=formula,
            index=first.where,
            expected=first.expected,
            observed=first.observed,
            allowed=first.allowed,
            differing=first.differing,
        )
        for other in others:
            error.add_note(f"also: the {named[other.index]}, {other.where}: {other.observed} for {other.expected}")
        raise error


class _Numbers:
    """One result of floating numbers: ours, the model's own, and the exact one, which is taken to be the model's own until it is known."""

    def __init__(self, index: int, new: torch.Tensor, own: torch.Tensor, rule: Rule) -> None:
        self.index, self.new, self.own, self._rule = index, new, own, rule
        self._exact: torch.Tensor | None = None
        self._moved = 0.0
        self.is_open = True
        wide = own.to(exact_dtype(own.dtype))
        self._look(wide, torch.ones_like(wide, dtype=torch.bool), 0.0)
        self.is_open |= rule.weighted is not None

    def _look(self, exact: torch.Tensor, counts: torch.Tensor, off: float, rounded: torch.dtype | None = None) -> None:
        """Whether it holds, if the model's own result may be off by so much."""
        self._beside, self._counts = exact, counts
        floor = floor_of(self.own.dtype, exact, counts, rounded, self._rule.weighted or 0.0)
        self._limit(self._rule.factor * off + floor)

    def _limit(self, allowed: float) -> None:
        self.found, self.allowed = largest(difference(self.new, self._beside), self._counts), allowed
        self.is_open = not self.found <= allowed

    @property
    def elements(self) -> int:
        return int(self._counts.sum())

    @property
    def is_steep(self) -> bool:
        """Whether few runs with noise don't tell how far roundings move it."""
        return self._rule.weighted is not None and self._moved > STEEP * largest(self._beside, self._counts)

    def beside(self, run: torch.Tensor | None) -> None:
        """Look again, beside the exact result, or beside one with noise once that is known. A few runs with noise don't come as far as any
        may: hence the same factor."""
        made = _like(run, self.own).to(exact_dtype(self.own.dtype))
        if self._exact is None:
            self._exact = made
            own = difference(self.own, made)
            # Where the model's own result overflows and the exact one does not, there is nothing to compare with.
            counts = ~own.isinf() if self._rule.kept is None else self._rule.kept & ~own.isinf()
            self._look(made, counts, largest(own, counts))
            return
        now, known = largest(difference(made, self._exact), self._counts), self.allowed
        self._moved = max(self._moved, now)
        self._look(self._exact, self._counts, now, self._rule.rounded)
        self._limit(max(known, self.allowed))

    def settle(self, rounding: float) -> None:
        """The last look: whether nothing is left of it but what the exact results' own dtype rounds, and what is found is less than the
        rounding of what cancelled out."""
        if largest(self._beside, self._beside.isfinite()) <= rounding * _NOTHING:
            self._counts = torch.ones_like(self._counts)
            self._limit(rounding)

    def difference(self) -> Difference:
        off = torch.where(self._counts, difference(self.new, self._beside), 0.0)
        place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        expected = f"{self.own[place].item():.6g} (exactly {self._beside[place].item():.6g})"
        return _difference(self, off > self.allowed, place, expected, f"an error of {self.allowed:.3g}")


class _Others:
    """One result of whole numbers or truth values: those that a rounding decides may be others."""

    found = allowed = 0.0
    is_steep = False

    def __init__(self, index: int, new: torch.Tensor, own: torch.Tensor) -> None:
        self.index, self.new, self.own = index, new, own
        self.elements = own.numel()
        self._wrong = new != own
        self.settle(0.0)

    def beside(self, run: torch.Tensor | None) -> None:
        self._wrong = self._wrong & (_like(run, self.own) == self.own)

    def settle(self, _: float) -> None:
        self.is_open = bool(self._wrong.any())

    def difference(self) -> Difference:
        place = tuple(int(i) for i in self._wrong.nonzero()[0])
        return _difference(self, self._wrong, place, f"{self.own[place].item():.6g}", "no difference")


def _difference(
    one: _Numbers | _Others, wrong: torch.Tensor, place: tuple[int, ...], expected: str, allowed: str
) -> Difference:
    return Difference(
        index=one.index,
        place=place,
        expected=expected,
        observed=f"{one.new[place].item():.6g}",
        allowed=allowed,
        differing=f"{int(wrong.sum())} of {wrong.numel()} elements",
    )


def floor_of(
    dtype: torch.dtype, exact: torch.Tensor, counts: torch.Tensor, rounded: torch.dtype | None, at_least: float = 0.0
) -> float:
    """The rounding of a result in its own dtype, or in the one that it was rounded to before, where that is coarser."""
    units = max(FLOOR_ULPS[each] * torch.finfo(each).eps for each in (dtype, rounded or dtype))
    return units * max(largest(exact, counts & exact.isfinite()), at_least)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The one with the fewest digits among those that have a rule."""
    return max(
        (dtype for dtype in dtypes if dtype in FLOOR_ULPS), key=lambda dtype: torch.finfo(dtype).eps, default=None
    )


def compare(new: Sequence[Any], own: Sequence[Any], run: Run, rule: Rule) -> Outcome:
    """Compare results one by one. None is a gradient of zeros. What is no plain tensor on either side is left out."""
    known = [(i, x, y) for i, (x, y) in enumerate(zip(new, own, strict=True)) if _plain(x, y)]
    of_other_kind = [_other_kind(i, x, y) for i, x, y in known if _is_other(x, y)]
    every = [_one(i, x, y, rule) for i, x, y in known if not _is_other(x, y)]
    for noise in (None, *(Noise(seed=seed) for seed in range(NOISY_RUNS_OF_STEEP))):
        left = [one for one in every if one.is_open]
        if not left or (noise is not None and noise.seed >= NOISY_RUNS and not any(one.is_steep for one in left)):
            break
        made = run(noise)
        for one in left:
            one.beside(made[one.index])
    # No noise shows in a gradient that is zero in every run, as that of the scores of a single key. What cancels out there is about as
    # large as the other results.
    counted = [*(one.own for one in every), *rule.beside] if any(one.is_open for one in every) else []
    rounding = max((_rounding(x, rule.rounded) for x in counted if x.dtype in FLOOR_ULPS), default=0.0)
    for one in every:
        if one.is_open:
            one.settle(rounding)
    worst = max((one for one in every if one.allowed), key=lambda one: one.found / one.allowed, default=None)
    compared = Compared(
        elements=sum(one.elements for one in every),
        error=worst.found if worst is not None else 0.0,
        allowed=worst.allowed if worst is not None else 0.0,
    )
    wrong = [one.difference() for one in every if one.is_open]
    return Outcome(compared=compared, differences=[*of_other_kind, *wrong])


def _rounding(x: torch.Tensor, rounded: torch.dtype | None) -> float:
    exact = x.to(exact_dtype(x.dtype))
    return floor_of(x.dtype, exact, exact.isfinite(), rounded)


def _plain(new: Any, own: Any) -> bool:
    return (new is not None or own is not None) and all(x is None or is_plain(x) for x in (new, own))


def _is_other(new: torch.Tensor | None, own: torch.Tensor | None) -> bool:
    return new is not None and own is not None and (new.shape, new.dtype) != (own.shape, own.dtype)


def _other_kind(index: int, new: torch.Tensor, own: torch.Tensor) -> Difference:
    return Difference(
        index=index,
        place=(),
        expected=f"{own.dtype} {list(own.shape)}",
        observed=f"{new.dtype} {list(new.shape)}",
        allowed="no difference",
        differing="all elements",
    )


def _one(index: int, new: Any, own: Any, rule: Rule) -> _Numbers | _Others:
    known = _real(own if own is not None else new)
    new, own = _like(new, known), _like(own, known)
    return _Numbers(index, new, own, rule) if own.is_floating_point() else _Others(index, new, own)


def is_plain(x: Any) -> bool:
    """Whether its elements can be compared."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_quantized:
        return False
    return x.dtype in FLOOR_ULPS or x.is_complex() or not x.is_floating_point()


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _like(x: torch.Tensor | None, known: torch.Tensor) -> torch.Tensor:
    """A result as real numbers; None: zeros."""
    return torch.zeros_like(known) if x is None else _real(x.detach())
