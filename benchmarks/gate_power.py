"""What the gate's rule catches, and how often it is wrong: simulated, with the noise of real rounds.

    python -m benchmarks.gate --device cpu --write --rounds rounds.json
    python -m benchmarks.gate_power rounds.json

A simulated run of a row is off by two things: what a real run of a row of its kind was off from the mean of its row's runs (made wider,
since a mean of few is too near to them), and what blocks of a real run's rounds give when they are drawn anew. Baselines, new runs and
repeated ones are drawn so, all rows at once, and judged by benchmarks/gate_rule.py. Then ours is made slower by 5%, in each row.

false alarms: of a row, and of the whole gate, which has one if any row has. caught: of those that were made slower. least: the smallest
decline that is caught in 95 of 100.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gate_cases, gate_rule
from benchmarks.gate_rule import Run
from benchmarks.harness import arg, command, show

PLANTED = 0.05
#: of what was planted
CAUGHT = 0.95
_TRIALS = 2000
_LEAST_TRIED = tuple(hundredth / 100 for hundredth in range(3, 41))
_DRAWN = 200


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Of one row. offsets: what runs of rows of its kind are off by. within: what drawing a run's rounds anew makes of its value, for each
    real run, and its own noise."""

    kind: str
    offsets: tuple[float, ...]
    within: tuple[tuple[Run, tuple[float, ...]], ...]

    def run(self, chance: random.Random) -> Run:
        """One that might have been, of a row whose ratio is 1."""
        of_run, drawn = chance.choice(self.within)
        value = chance.choice(self.offsets) + chance.choice(drawn) - of_run.value
        return Run(value=value, noise=of_run.noise)


@dataclass(frozen=True, kw_only=True)
class Power:
    """Of one row. caught: of a decline of 5%. least: the smallest one of those that are tried; infinite for none."""

    row: str
    spread: float
    false_alarms: float
    caught: float
    least: float


def noises(runs: Sequence[Mapping[str, Mapping[str, Any]]], kinds: Mapping[str, str]) -> dict[str, Noise]:
    """By row, of those that every run has. Raises ValueError with fewer than two runs: one says nothing of what processes differ by."""
    if len(runs) < 2:
        raise ValueError(
            "the rounds of two runs at least are needed: python -m benchmarks.gate --write --runs 2 --rounds FILE"
        )
    names = [name for name in kinds if all(name in run and "failure" not in run[name] for run in runs)]
    values = {name: [gate_rule.run_of(run[name]) for run in runs] for name in names}
    offsets: dict[str, list[float]] = {}
    wider = math.sqrt(len(runs) / (len(runs) - 1))
    for name in names:
        mean = statistics.fmean(run.value for run in values[name])
        offsets.setdefault(kinds[name], []).extend(wider * (run.value - mean) for run in values[name])
    return {
        name: Noise(
            kind=kinds[name],
            offsets=tuple(offsets[kinds[name]]),
            within=tuple(
                (value, tuple(gate_rule.resampled(run[name], _DRAWN)))
                for run, value in zip(runs, values[name], strict=True)
            ),
        )
        for name in names
    }


def simulate(of_rows: Mapping[str, Noise], runs: int, trials: int = _TRIALS) -> tuple[list[Power], float]:
    """For each row, and how many of the whole gate's runs have a false alarm. runs: that a baseline is the median of."""
    chance = random.Random(0)
    alarms = dict.fromkeys(of_rows, 0)
    least: dict[str, list[float]] = {name: [] for name in of_rows}
    spreads: dict[str, list[float]] = {name: [] for name in of_rows}
    any_alarm = 0
    kinds = {name: noise.kind for name, noise in of_rows.items()}
    for _ in range(trials):
        drawn = {name: [noise.run(chance) for _ in range(runs)] for name, noise in of_rows.items()}
        before = gate_rule.baselines(drawn, kinds)
        failed = False
        for name, noise in of_rows.items():
            now = [noise.run(chance) for _ in range(2)]
            spreads[name].append(before[name].spread)
            caught = (planted for planted in _LEAST_TRIED if _fails(before[name], now, planted))
            least[name].append(next(caught, math.inf))
            is_alarm = _fails(before[name], now, 0.0)
            alarms[name] += is_alarm
            failed |= is_alarm
        any_alarm += failed
    return [
        Power(
            row=name,
            spread=statistics.median(spreads[name]),
            false_alarms=alarms[name] / trials,
            caught=sum(found <= PLANTED for found in least[name]) / trials,
            least=sorted(least[name])[math.ceil(CAUGHT * trials) - 1],
        )
        for name in of_rows
    ], any_alarm / trials


def _fails(before: gate_rule.Baseline, now: Sequence[Run], planted: float) -> bool:
    """As the gate does it, with the run that it repeats a row by."""
    return gate_rule.is_slower(before, [Run(value=run.value + math.log(1 - planted), noise=run.noise) for run in now])


@command(
    __doc__,
    arg("rounds", type=Path, nargs="+", help="JSON of benchmarks.gate --rounds"),
    arg("--runs", type=int, help="that a baseline is the median of (as many as there are)"),
    arg("--trials", type=int, default=_TRIALS),
)
def main(given: Namespace) -> int:
    """0 where 5% are caught in 95 of 100, in every row, and the gate's false alarms are 1% at most."""
    kinds = {row.name: row.kind for device in ("cpu", "cuda") for row in gate_cases.rows(device)}
    runs = [run for path in given.rounds for run in json.loads(path.read_text())]
    of_baseline = given.runs or len(runs)
    powers, of_all = simulate(noises(runs, kinds), of_baseline, given.trials)

    def line(power: Power) -> list[str]:
        least = "more than 40%" if math.isinf(power.least) else f"{power.least:.0%}"
        return [power.row, f"{power.spread:.2%}", f"{power.false_alarms:.2%}", f"{power.caught:.1%}", least]

    title = f"{len(runs)} real runs, a baseline of {of_baseline}: false alarms of the whole gate {of_all:.2%}"
    show(title, ("row", "a run is off by", "false alarms", "5% caught", "least caught"), map(line, powers))
    return int(of_all > 0.01 or any(power.caught < CAUGHT for power in powers))


if __name__ == "__main__":
    sys.exit(main())
