"""How our choices stand to the other kernels, from the rows of bench_select.py."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# A choice that takes so many times as long as the best side is as good as it.
CLOSE, WORST = 1.03, 1.10
# A peer that is no kernel that could be chosen: the site before anything is known of it.
_NO_CHOICE = ("presented",)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One pass of one case. times: microseconds of every side that ran. chosen, best: names of sides; best may be the chosen one."""

    case: str
    which: str
    times: Mapping[str, float]
    chosen: str

    @property
    def best(self) -> str:
        kernels = {name: took for name, took in self.times.items() if name not in _NO_CHOICE}
        return min(kernels, key=lambda name: (kernels[name], name != self.chosen))

    @property
    def regret(self) -> float:
        """How many times the best side's time the choice takes."""
        return self.times[self.chosen] / self.times[self.best]

    def ratio(self, other: str) -> float | None:
        """The other's time over that of the choice; None if that did not run."""
        return self.times[other] / self.times[self.chosen] if other in self.times else None


def of(rows: Iterable[Mapping[str, str]]) -> list[Shape]:
    """A shape for each pass of each case of which the chosen side ran, in the order of the rows."""
    found = []
    for (case, which), group in itertools.groupby(rows, key=lambda row: (row["case"], row["pass"])):
        sides = list(group)
        times = {row["side"]: float(row["p50_us"]) for row in sides if row.get("p50_us")}
        chosen = next((row["side"] for row in sides if row.get("chosen")), "")
        if chosen in times:
            found.append(Shape(case=case, which=which, times=times, chosen=chosen))
    return found


def summary(shapes: Sequence[Shape]) -> str:
    """In words: the share of choices that are as good as the best side, the worst, and geometric means."""
    if not shapes:
        return "nothing was measured"
    close = sum(shape.regret <= CLOSE for shape in shapes) / len(shapes)
    worst = max(shapes, key=lambda shape: shape.regret)
    lines = [
        f"{len(shapes)} shapes, {len({shape.case for shape in shapes})} of them with other sizes or masks",
        f"within {CLOSE - 1:.0%} of the best side: {close:.1%}; more than {WORST - 1:.0%} slower: "
        f"{sum(shape.regret > WORST for shape in shapes)}",
        f"worst: {worst.case} {worst.which}, {worst.chosen} takes {worst.regret:.3f} times {worst.best}",
    ]
    for other in ("sdpa", "presented", "flex", "fa4", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "triton"):
        ratios = [ratio for shape in shapes if (ratio := shape.ratio(other)) is not None]
        if ratios:
            lines.append(f"{other} over ours, geometric mean of {len(ratios)}: {statistics.geometric_mean(ratios):.3f}")
    return "\n".join(lines)
