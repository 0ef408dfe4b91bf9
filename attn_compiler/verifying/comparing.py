"""Comparison of results with the model's own by FlashAttention's rule, with as many runs of the model's own math as it takes.

Most results are within the rounding of their dtype. Otherwise the exact results are computed, and a result may have twice the error of the
model's own (three times with a softcap). Otherwise runs with noise show the spread of other roundings, times the same factor. Only noise
detects sums that cancel, and branches that a rounding decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.reasons.errors import VerificationMismatch
from attn_compiler.reporting.verifications import Verification
from attn_compiler.spec.numerics import FACTOR, FLOOR_ULPS, difference, exact_dtype, largest
from attn_compiler.verifying.interpreting import Noise

#: runs with noise before a difference counts as a mismatch
NOISY_RUNS = 4
#: the runs if roundings move a result by a twentieth of it, as in a steep softmax: few runs come near the largest error
NOISY_RUNS_OF_STEEP = 16
STEEP = 0.05
#: the share of a rounding below which an exact result counts as zero
_NOTHING = 1e-6

#: The model's own results in wider numbers: exact ones without noise, else with noise on each step
Run = Callable[[Noise | None], Sequence[torch.Tensor | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """elements: their number. error: the largest difference. allowed: its limit, if there is one. left_out: further elements may rightly
    differ, and do. instead: the value for the model's later nodes, if it is another than the compared one."""

    elements: int
    error: float | None = None
    allowed: float | None = None
    left_out: bool = False
    instead: torch.Tensor | None = None

    def said(self, **words: str | None) -> Verification:
        """Return the result of a check. words: the other fields."""
        numbers: dict[str, Any] = {"elements": self.elements, "error": self.error, "allowed": self.allowed}
        return Verification(**numbers | words)

    @staticmethod
    def merged(parts: Iterable[Compared]) -> Compared:
        """Sum the elements, and keep the numbers of the part nearest to its limit."""
        elements, nearest, error, allowed = 0, 0.0, 0.0, 0.0
        for part in parts:
            elements += part.elements
            if part.allowed and part.error is not None and part.error / part.allowed >= nearest:
                nearest, error, allowed = part.error / part.allowed, part.error, part.allowed
        return Compared(elements=elements, error=error, allowed=allowed)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The allowed difference, and names for people. names: of all results. site, formula: as in VerificationMismatch.

    rounded: the coarsest dtype on the way to the results. beside: other operands, as large as values that may cancel. weighted: the largest
    operand of a weighted mean, if the result is one. A mean is always compared with the exact one. kept: the elements that count, None:
    all.
    """

    names: Sequence[str]
    site: str
    formula: str
    factor: float = FACTOR
    rounded: torch.dtype | None = None
    beside: Sequence[torch.Tensor] = ()
    weighted: float | None = None
    kept: torch.Tensor | None = None

    def mismatch(self, index: int, place: Sequence[int], **found: str) -> VerificationMismatch:
        """Make the error of one result. place: its worst element."""
        words = {"site": self.site, "what": self.names[index], "formula": self.formula}
        return VerificationMismatch(**words, index=str(list(place)) if place else "every element", **found)


def raise_first(found: Sequence[VerificationMismatch]) -> None:
    """Raise the first mismatch, if there is one. Notes on it name the others."""
    for other in found[1:]:
        found[0].add_note(
            f"also: the {other.what} at {other.site}, {other.index}: {other.observed} for {other.expected}"
        )
    if found:
        raise found[0]


class _Numbers:
    """One floating-point result: ours, the model's own, and the exact one, which is the model's own until it is known."""

    def __init__(self, index: int, new: torch.Tensor, own: torch.Tensor, rule: Rule) -> None:
        self.index, self.new, self.own, self.rule = index, new, own, rule
        self._exact: torch.Tensor | None = None
        self._moved, self.is_open = 0.0, True
        wide = own.to(exact_dtype(own.dtype))
        self._test(wide, torch.ones_like(wide, dtype=torch.bool), 0.0)
        self.is_open = self.is_open or rule.weighted is not None

    def _test(self, exact: torch.Tensor, counts: torch.Tensor, off: float, rounded: torch.dtype | None = None) -> None:
        """Compare ours with a result of the model. counts: the elements to compare. off: the error of the model's own result."""
        self._beside, self._counts = exact, counts
        self._limit(self.rule.factor * off + _floor(self.own, exact, counts, rounded, self.rule.weighted or 0.0))

    def _limit(self, allowed: float) -> None:
        self.found, self.allowed = largest(difference(self.new, self._beside), self._counts), allowed
        self.is_open, self.elements = not self.found <= allowed, int(self._counts.sum())

    @property
    def is_steep(self) -> bool:
        """True if few runs with noise do not show how far roundings move it."""
        return self.rule.weighted is not None and self._moved > STEEP * largest(self._beside, self._counts)

    def compare_with(self, run: torch.Tensor | None) -> None:
        """Compare again, with the exact result, or with one with noise once that is known. A few runs with noise do not reach the largest
        possible error: hence the same factor."""
        made = _like(run, self.own).to(exact_dtype(self.own.dtype))
        if self._exact is None:
            self._exact = made
            own = difference(self.own, made)
            # If the model's own result overflows and the exact one does not, there is nothing to compare with.
            counts = ~own.isinf() if self.rule.kept is None else self.rule.kept & ~own.isinf()
            self._test(made, counts, largest(own, counts))
            return
        now, known = largest(difference(made, self._exact), self._counts), self.allowed
        self._moved = max(self._moved, now)
        self._test(self._exact, self._counts, now, self.rule.rounded)
        self._limit(max(known, self.allowed))

    def settle(self, rounding: float) -> None:
        """Compare a last time: accept if the exact results are zero but for rounding, and the difference is below `rounding`. rounding:
        that of the numbers that cancelled."""
        if largest(self._beside, self._beside.isfinite()) <= rounding * _NOTHING:
            self._counts = torch.ones_like(self._counts)
            self._limit(rounding)

    def mismatch(self) -> VerificationMismatch:
        off = torch.where(self._counts, difference(self.new, self._beside), 0.0)
        place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        expected = f"{self.own[place].item():.6g} (exactly {self._beside[place].item():.6g})"
        return _mismatch(self, off > self.allowed, place, expected, f"an error of {self.allowed:.3g}")


class _Others:
    """One integer or bool result: elements that a rounding decides may differ."""

    found = allowed = 0.0
    is_steep = False

    def __init__(self, index: int, new: torch.Tensor, own: torch.Tensor, rule: Rule) -> None:
        self.index, self.new, self.own, self.rule = index, new, own, rule
        self.elements, self._wrong = own.numel(), new != own
        self.settle(0.0)

    def compare_with(self, run: torch.Tensor | None) -> None:
        self._wrong = self._wrong & (_like(run, self.own) == self.own)

    def settle(self, _: float) -> None:
        self.is_open = bool(self._wrong.any())

    def mismatch(self) -> VerificationMismatch:
        place = tuple(int(i) for i in self._wrong.nonzero()[0])
        return _mismatch(self, self._wrong, place, f"{self.own[place].item():.6g}", "no difference")


def _mismatch(
    one: _Numbers | _Others, wrong: torch.Tensor, place: tuple[int, ...], expected: str, allowed: str
) -> VerificationMismatch:
    found = {"observed": f"{one.new[place].item():.6g}", "differing": f"{int(wrong.sum())} of {wrong.numel()} elements"}
    return one.rule.mismatch(one.index, place, expected=expected, allowed=allowed, **found)


def compare(new: Sequence[Any], own: Sequence[Any], run: Run, rule: Rule) -> Compared:
    """Compare results one by one. None counts as a gradient of zeros. A pair is left out unless each side is a plain tensor or None. Raises
    VerificationMismatch for the first wrong one."""
    wrong: list[VerificationMismatch] = []
    every: list[_Numbers | _Others] = []
    for i, (x, y) in enumerate(zip(new, own, strict=True)):
        if (x is None and y is None) or not all(z is None or is_plain(z) for z in (x, y)):
            continue
        if x is not None and y is not None and (x.shape, x.dtype) != (y.shape, y.dtype):
            expected, observed = (f"{z.dtype} {list(z.shape)}" for z in (y, x))
            more = {"allowed": "no difference", "differing": "all elements"}
            wrong.append(rule.mismatch(i, (), expected=expected, observed=observed, **more))
            continue
        known = _real(y if y is not None else x)
        x, y = _like(x, known), _like(y, known)
        every.append((_Numbers if y.is_floating_point() else _Others)(i, x, y, rule))
    # Run the model's math until all results are settled, or the runs are used up.
    for noise in (None, *(Noise(seed=seed) for seed in range(NOISY_RUNS_OF_STEEP))):
        left = [one for one in every if one.is_open]
        if not left or (noise is not None and noise.seed >= NOISY_RUNS and not any(one.is_steep for one in left)):
            break
        made = run(noise)
        for one in left:
            one.compare_with(made[one.index])
    # Noise does not show in a gradient that is zero in every run, as that of the scores of a single key. The cancelling terms are about
    # as large as the other results.
    if any(one.is_open for one in every):
        summands = [x for x in (*(one.own for one in every), *rule.beside) if x.dtype in FLOOR_ULPS]
        wide = [(x, x.to(exact_dtype(x.dtype))) for x in summands]
        roundings = [_floor(x, y, y.isfinite(), rule.rounded) for x, y in wide]
        for one in every:
            if one.is_open:
                one.settle(max(roundings, default=0.0))
    raise_first([*wrong, *(one.mismatch() for one in every if one.is_open)])
    return Compared.merged(Compared(elements=one.elements, error=one.found, allowed=one.allowed) for one in every)


def _floor(
    own: torch.Tensor, exact: torch.Tensor, counts: torch.Tensor, rounded: torch.dtype | None, at_least: float = 0.0
) -> float:
    """Return the rounding of a result in its own dtype, or in a coarser one that it was rounded to before."""
    units = max(FLOOR_ULPS[each] * torch.finfo(each).eps for each in (own.dtype, rounded or own.dtype))
    return units * max(largest(exact, counts & exact.isfinite()), at_least)


def is_plain(x: Any) -> bool:
    """Return True if its elements can be compared."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_quantized:
        return False
    return x.dtype in FLOOR_ULPS or x.is_complex() or not x.is_floating_point()


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _like(x: torch.Tensor | None, known: torch.Tensor) -> torch.Tensor:
    """Return a result as real numbers; zeros for None."""
    return torch.zeros_like(known) if x is None else _real(x.detach())
