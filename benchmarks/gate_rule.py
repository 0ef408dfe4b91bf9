"""When a ratio counts as lower than it was: numbers alone, so that the rule's power can be worked out from real rounds.

A run times a row's two sides in turn, in one process. Its value is the logarithm of the median over the rounds of the peer's time over
ours, or where there are few rounds, of the peer's least time over our least. A baseline is the median of several runs, each of a process of
its own. What a run is off by is taken from how far runs of the same kind of row lie apart, which has the noise within a run in it and what
differs from process to process, or from a bootstrap of a run's own rounds, if that is more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: a decline below this never counts
TOLERANCE = 0.03
#: how many times the noise a decline has to be, at least
DEVIATIONS = 2.5
#: of one run, where there is only one to tell by
UNKNOWN_SPREAD = 0.01
_RESAMPLES = 400
#: of fewer rounds, which are long, the best of each side counts: what else the machine does only makes them longer
_FEW = 15
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
    times = _times(rounds)
    found = resampled(rounds, _RESAMPLES)
    return Run(value=float(_values(*times)), noise=statistics.stdev(found) if times[0].numel() > 1 else math.inf)


def resampled(rounds: Rounds, times: int, seed: int = 0) -> list[float]:
    """Values of rounds drawn from these, in blocks of neighbours, which are alike."""
    ours, peer = _times(rounds)
    count = ours.numel()
    block = max(1, round(count ** (1 / 3)))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, count, (times, -(-count // block)), generator=generator)
    places = (starts[..., None] + torch.arange(block)).flatten(1)[:, :count] % count
    found: list[float] = _values(ours[places], peer[places]).tolist()
    return found


def _times(rounds: Rounds) -> tuple[Tensor, Tensor]:
    """Of ours and of the peer."""
    ours, peer = (torch.tensor(rounds[side], dtype=torch.float64) for side in (OURS, PEER))
    return ours, peer


def _values(ours: Tensor, peer: Tensor) -> Tensor:
    """Over the last dimension, the rounds."""
    if ours.shape[-1] < _FEW:
        return (peer.amin(-1) / ours.amin(-1)).log()
    # quantile, since the median of an even number of values is between two of them.
    return (peer / ours).log().quantile(0.5, dim=-1)


def baselines(runs: Mapping[str, Sequence[Run]], kinds: Mapping[str, str]) -> dict[str, Baseline]:
    """By row. kinds: of the rows; rows of one kind tell together how far their runs lie apart."""
    spreads = {kind: _spread([runs[name] for name in runs if kinds[name] == kind]) for kind in set(kinds.values())}
    return {
        name: Baseline(
            value=statistics.median(run.value for run in of_row),
            runs=len(of_row),
            spread=max(spreads[kinds[name]], statistics.median(run.noise for run in of_row)),
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
