"""When a ratio counts as lower than it was: numbers alone, so that the rule's power can be worked out from real rounds.

A run times a row's two sides in turn, in one process. Its value is the logarithm of the median over the rounds of the peer's time over
ours. A baseline is the median of several runs, each of a process of its own. What a run is off by is taken from how far runs of the same
kind of row lie apart, which has the noise within a run in it and what differs from process to process, or from a bootstrap of the run's
own rounds, whichever is more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

#: a decline below this never counts
TOLERANCE = 0.03
#: how many times the noise a decline has to be, at least
DEVIATIONS = 2.5
#: of one run, where there is only one to tell by
UNKNOWN_SPREAD = 0.01
_RESAMPLES = 400
#: the variance of a median of a few, in that of their mean
_OF_A_MEDIAN = 1.5

#: sides of a row -> milliseconds, round by round
Rounds = Mapping[str, Sequence[float]]
OURS, PEER = "ours", "peer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of a row. value: the logarithm of its ratio. noise: of that, by its own rounds."""

    value: float
    noise: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What a row was. runs: how many it is the median of. spread: how far one run may be off, a standard deviation."""

    value: float
    runs: int
    spread: float


def run_of(rounds: Rounds) -> Run:
    """Rounds lie in blocks for the bootstrap: neighbours are alike."""
    ratios = [math.log(peer / ours) for ours, peer in zip(rounds[OURS], rounds[PEER], strict=True)]
    medians = resampled(ratios, _RESAMPLES)
    return Run(value=statistics.median(ratios), noise=statistics.stdev(medians) if len(ratios) > 1 else math.inf)


def resampled(values: Sequence[float], times: int, seed: int = 0) -> list[float]:
    """Medians of rounds drawn from these, in blocks of neighbours."""
    count = len(values)
    block = max(1, round(count ** (1 / 3)))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, count, (times, -(-count // block)), generator=generator)
    places = (starts[..., None] + torch.arange(block)).flatten(1)[:, :count] % count
    drawn = torch.tensor(values, dtype=torch.float64)[places]
    # quantile, since the median of an even number of values is between two of them.
    found: list[float] = drawn.quantile(0.5, dim=1).tolist()
    return found


def baselines(runs: Mapping[str, Sequence[Run]], kinds: Mapping[str, str]) -> dict[str, Baseline]:
    """By row. kinds: of the rows; rows of one kind tell together how far their runs lie apart."""
    spreads = {kind: _spread([runs[name] for name in runs if kinds[name] == kind]) for kind in set(kinds.values())}
    return {
        name: Baseline(
            value=statistics.median(run.value for run in of_row),
            runs=len(of_row),
            spread=max(spreads[kinds[name]], *(run.noise for run in of_row)),
        )
        for name, of_row in runs.items()
    }


def _spread(rows: Sequence[Sequence[Run]]) -> float:
    """The standard deviation of a run about the mean of its row's."""
    freedom = sum(len(runs) - 1 for runs in rows)
    if not freedom:
        return UNKNOWN_SPREAD
    means = [statistics.fmean(run.value for run in runs) for runs in rows]
    squares = sum((run.value - mean) ** 2 for runs, mean in zip(rows, means, strict=True) for run in runs)
    return math.sqrt(squares / freedom)


def decline(baseline: Baseline, run: Run) -> float:
    """How much lower the ratio is than it was: 0.05 for 5%."""
    return 1.0 - math.exp(run.value - baseline.value)


def bound(baseline: Baseline, run: Run) -> float:
    """The decline that counts: the tolerance, or what noise may make, if that is more."""
    noise = max(baseline.spread, run.noise) * math.sqrt(1 + _OF_A_MEDIAN / baseline.runs)
    return max(TOLERANCE, DEVIATIONS * noise)


def is_slower(baseline: Baseline, runs: Sequence[Run]) -> bool:
    """Whether each of these is: one that was disturbed says nothing if another is as before."""
    return all(decline(baseline, run) > bound(baseline, run) for run in runs)
