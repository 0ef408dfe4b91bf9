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

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import gate_cases, gate_rule
from benchmarks.gate_rule import Run

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
    """Of one row. caught: of a decline of 5%."""

    row: str
    spread: float
    false_alarms: float
    caught: float
    least: float | None


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
            least[name].append(_least_caught(before[name], now))
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
            least=_caught_in_most(least[name]),
        )
        for name in of_rows
    ], any_alarm / trials


def _fails(before: gate_rule.Baseline, now: Sequence[Run], planted: float) -> bool:
    """As the gate does it, with the run that it repeats a row by."""
    return gate_rule.is_slower(before, [Run(value=run.value + math.log(1 - planted), noise=run.noise) for run in now])


def _least_caught(before: gate_rule.Baseline, now: Sequence[Run]) -> float:
    """The smallest decline of those that are tried that would have been caught in this trial; infinite for none."""
    return next((planted for planted in _LEAST_TRIED if _fails(before, now, planted)), math.inf)


def _caught_in_most(least: Sequence[float]) -> float | None:
    found = sorted(least)[math.ceil(CAUGHT * len(least)) - 1]
    return None if math.isinf(found) else found


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where 5% are caught in 95 of 100, in every row, and the gate's false alarms are 1% at most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=Path, nargs="+", help="JSON of benchmarks.gate --rounds")
    parser.add_argument("--runs", type=int, help="that a baseline is the median of (as many as there are)")
    parser.add_argument("--trials", type=int, default=_TRIALS)
    options = parser.parse_args(arguments)
    kinds = {row.name: row.kind for device in ("cpu", "cuda") for row in gate_cases.rows(device)}
    runs = [run for path in options.rounds for run in json.loads(path.read_text())]
    of_baseline = options.runs or len(runs)
    powers, of_all = simulate(noises(runs, kinds), of_baseline, options.trials)
    table = Table(
        title=f"{len(runs)} real runs, a baseline of {of_baseline}: false alarms of the whole gate {of_all:.2%}"
    )
    for name in ("row", "a run is off by", "false alarms", "5% caught", "least caught"):
        table.add_column(name)
    for power in powers:
        shown = "more than 40%" if power.least is None else f"{power.least:.0%}"
        table.add_row(power.row, f"{power.spread:.2%}", f"{power.false_alarms:.2%}", f"{power.caught:.1%}", shown)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return int(of_all > 0.01 or any(power.caught < CAUGHT for power in powers))


if __name__ == "__main__":
    sys.exit(main())
