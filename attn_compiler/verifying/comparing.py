"""Results against the model's own: FlashAttention's rule, with as many runs of the model's own math as it takes.

Most results are within the rounding of their dtype, and the model's own run decides. Else the exact ones are made, and the result
may be off from them by twice what the model's own is off by (three times with a softcap). Else it is asked how far other roundings of the
same math come, times the same factor (interpreting.py). Only that tells of sums in which everything cancels out, and of what is
decided on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from attn_compiler.verifying.numbers import FLOOR_ULPS, NOISY_RUNS, difference, exact_dtype, largest
from attn_compiler.verifying.outputs import Compared

#: the share of a rounding below which an exact result is zero, but for its own rounding
_NOTHING = 1e-6


class Runs(Protocol):
    """Results of the model's own graph, in one order."""

    def exact(self) -> Sequence[torch.Tensor | None]: ...

    def noisy(self, seed: int) -> Sequence[torch.Tensor | None]: ...


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A result that is not right. index: which one. place: its worst element; expected, exact, observed: there."""

    index: int
    place: tuple[int, ...]
    expected: str
    observed: str
    allowed: str
    differing: str


@dataclass(kw_only=True)
class _One:
    """One result: ours, the model's own, and what is known of the exact one so far."""

    index: int
    new: torch.Tensor
    own: torch.Tensor
    exact: torch.Tensor | None = None
    unstable: torch.Tensor | None = None
    found: float = 0.0
    allowed: float = 0.0

    @property
    def counted(self) -> bool:
        return self.own.is_floating_point()

    def first(self) -> bool:
        """Whether it holds beside the model's own result."""
        if not self.counted:
            return torch.equal(self.new, self.own)
        wide = self.own.to(exact_dtype(self.own.dtype))
        return self._holds(wide, floor_of(self.own, wide), torch.ones_like(wide, dtype=torch.bool))

    def beside(self, exact: torch.Tensor, factor: float) -> bool:
        """Whether it holds beside the exact result."""
        if not self.counted:
            self.unstable = exact != self.own
            return False
        self.exact = exact
        own = difference(self.own, exact)
        counts = ~own.isinf()
        return self._holds(exact, factor * largest(own, counts) + floor_of(self.own, exact), counts)

    def with_noise(self, noisy: torch.Tensor, factor: float, rounded: torch.dtype | None, *, last: bool) -> bool:
        """Whether it holds where the model's own could have come as far. A few runs don't come as far as any may: hence the same factor."""
        if not self.counted:
            self.unstable = (noisy != self.own) | (False if self.unstable is None else self.unstable)
            return last and not bool(((self.new != self.own) & ~self.unstable).any())
        if self.exact is None:
            return False
        counts = ~difference(self.own, self.exact).isinf()
        off = factor * largest(difference(noisy, self.exact), counts) + floor_of(self.own, self.exact, rounded)
        limit = max(self.allowed, off)
        return self._holds(self.exact, limit, counts)

    def cancelled_out(self, rounding: float) -> bool:
        """Whether nothing is left of it but what the exact results' own dtype rounds, and what is found is less than the rounding of
        what cancelled out."""
        if not self.counted or self.exact is None or largest(self.exact, self.exact.isfinite()) > rounding * _NOTHING:
            return False
        return self._holds(self.exact, rounding, torch.ones_like(self.exact, dtype=torch.bool))

    def _holds(self, exact: torch.Tensor, allowed: float, counts: torch.Tensor) -> bool:
        self.found, self.allowed = largest(difference(self.new, exact), counts), allowed
        return self.found <= allowed

    def difference(self) -> Difference:
        if not self.counted:
            wrong = (self.new != self.own) & ~(
                torch.zeros_like(self.own, dtype=torch.bool) if self.unstable is None else self.unstable
            )
            return self._differs(wrong, tuple(int(i) for i in wrong.nonzero()[0]), "no difference")
        exact = self.own if self.exact is None else self.exact
        off = torch.where(difference(self.own, exact).isinf(), 0.0, difference(self.new, exact))
        place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        return self._differs(off > self.allowed, place, f"an error of {self.allowed:.3g}")

    def _differs(self, wrong: torch.Tensor, place: tuple[int, ...], allowed: str) -> Difference:
        exactly = "" if self.exact is None else f" (exactly {self.exact[place].item():.6g})"
        return Difference(
            index=self.index,
            place=place,
            expected=f"{self.own[place].item():.6g}{exactly}",
            observed=f"{self.new[place].item():.6g}",
            allowed=allowed,
            differing=f"{int(wrong.sum())} of {wrong.numel()} elements",
        )


def floor_of(own: torch.Tensor, exact: torch.Tensor, rounded: torch.dtype | None = None) -> float:
    """The rounding of a result in its own dtype, or in the one that it was rounded to before, where that is coarser."""
    units = max(FLOOR_ULPS[dtype] * torch.finfo(dtype).eps for dtype in (own.dtype, rounded or own.dtype))
    return units * largest(exact, exact.isfinite())


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The one with the fewest digits among those that have a rule."""
    return max(
        (dtype for dtype in dtypes if dtype in FLOOR_ULPS), key=lambda dtype: torch.finfo(dtype).eps, default=None
    )


@dataclass(kw_only=True)
class Outcome:
    """compared: of all results together, by the one that came nearest to its limit; worst: which that is. differences: what is wrong."""

    compared: Compared
    worst: int | None = None
    differences: list[Difference] = field(default_factory=list)


def compare(
    new: Sequence[Any],
    own: Sequence[Any],
    runs: Runs,
    factor: float,
    rounded: torch.dtype | None = None,
    beside: Sequence[torch.Tensor] = (),
) -> Outcome:
    """Compare results one by one. None is a gradient of zeros. What is no plain tensor on either side is left out.

    rounded: the coarsest dtype on the way to the results.
    beside: other numbers that the results are computed from, as large as what may cancel out.
    """
    known = [(i, x, y) for i, (x, y) in enumerate(zip(new, own, strict=True)) if _plain(x, y)]
    others = [_other_kind(i, x, y) for i, x, y in known if _is_other(x, y)]
    every = [_pair(i, x, y) for i, x, y in known if not _is_other(x, y)]
    open_ones = [one for one in every if not one.first()]
    if open_ones:
        exact = runs.exact()
        open_ones = [one for one in open_ones if not one.beside(_like(exact[one.index], one), factor)]
    for seed in range(NOISY_RUNS):
        if not open_ones:
            break
        noisy = runs.noisy(seed)
        last = seed == NOISY_RUNS - 1
        open_ones = [
            one for one in open_ones if not one.with_noise(_like(noisy[one.index], one), factor, rounded, last=last)
        ]
    if open_ones:
        # No noise shows in a gradient that is zero in every run, as that of the scores of a single key. What cancels out there is about as
        # large as the other results.
        counted = (*(one.own for one in every if one.counted), *(x for x in beside if x.dtype in FLOOR_ULPS))
        rounding = max((floor_of(x, x.to(exact_dtype(x.dtype)), rounded) for x in counted), default=0.0)
        open_ones = [one for one in open_ones if not one.cancelled_out(rounding)]
    shares = {one.index: one.found / one.allowed for one in every if one.allowed}
    worst = max(shares, key=lambda index: shares[index], default=None)
    by_index = {one.index: one for one in every}
    return Outcome(
        compared=Compared(
            elements=sum(one.own.numel() for one in every),
            error=by_index[worst].found if worst is not None else 0.0,
            allowed=by_index[worst].allowed if worst is not None else 0.0,
        ),
        worst=worst,
        differences=[*others, *(one.difference() for one in open_ones)],
    )


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


def _pair(index: int, new: Any, own: Any) -> _One:
    known = own if own is not None else new
    new, own = (_real(torch.zeros_like(known) if x is None else x.detach()) for x in (new, own))
    return _One(index=index, new=new, own=own)


def is_plain(x: Any) -> bool:
    """Whether its elements can be compared."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_quantized:
        return False
    return x.dtype in FLOOR_ULPS or x.is_complex() or not x.is_floating_point()


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _like(x: torch.Tensor | None, one: _One) -> torch.Tensor:
    """A result of another run, in the exact dtype."""
    found = torch.zeros_like(one.own) if x is None else _real(x.detach())
    return found.to(exact_dtype(one.own.dtype)) if one.counted else found
