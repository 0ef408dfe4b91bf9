from __future__ import annotations

import math
import random

import pytest

from benchmarks import gate_rule
from benchmarks.gate_rule import OURS, PEER, Baseline, Run


def rounds(ratio: float, noise: float = 0.005, count: int = 40, seed: int = 0) -> dict[str, list[float]]:
    chance = random.Random(seed)
    return {OURS: [10.0] * count, PEER: [10.0 * ratio * math.exp(chance.gauss(0, noise)) for _ in range(count)]}


def test_a_run_is_its_median_and_says_how_sure_it_is() -> None:
    run = gate_rule.run_of(rounds(1.5))
    assert math.exp(run.value) == pytest.approx(1.5, abs=0.005)
    # The standard error of a median of 40 is 1.25 * 0.005 / sqrt(40).
    assert 0.0004 < run.noise < 0.002
    assert gate_rule.run_of(rounds(1.5, noise=0.05)).noise > 5 * run.noise


def test_rounds_are_drawn_in_blocks_since_neighbours_are_alike() -> None:
    """A machine that is slow for half of the time: rounds drawn one by one would have as many of both halves more often."""
    halves = [1.0] * 20 + [2.0] * 20
    in_blocks, mixed = (
        gate_rule.resampled({OURS: [1.0] * 40, PEER: times}, 400)
        for times in (halves, random.Random(0).sample(halves, 40))
    )
    between = [sum(0.01 < value < 0.69 for value in values) for values in (in_blocks, mixed)]
    assert between[0] < between[1]


def test_of_few_rounds_the_best_of_each_side_counts() -> None:
    few = {OURS: [10.0, 14.0, 11.0], PEER: [20.0, 22.0, 31.0]}
    assert math.exp(gate_rule.run_of(few).value) == pytest.approx(2.0)
    assert gate_rule.run_of(few).noise > 0
    assert gate_rule.run_of({OURS: [1.0], PEER: [1.0]}).noise == math.inf


@pytest.mark.parametrize(("fell", "slower"), [(0.0, False), (0.02, False), (0.029, False), (0.035, True), (0.05, True)])
def test_a_decline_beyond_three_percent_counts(fell: float, slower: bool) -> None:
    before = Baseline(value=math.log(2.0), runs=3, spread=0.004)
    now = gate_rule.run_of(rounds(2.0 * (1 - fell)))
    assert gate_rule.is_slower(before, [now]) == slower
    assert gate_rule.decline(before, now) == pytest.approx(fell, abs=0.004)


def test_what_noise_may_make_does_not_count() -> None:
    before = Baseline(value=0.0, runs=1, spread=0.02)
    now = Run(value=math.log(0.93), noise=0.001)
    assert gate_rule.bound(before, now) == pytest.approx(gate_rule.DEVIATIONS * 0.02 * 2.5**0.5)
    assert not gate_rule.is_slower(before, [now])
    # Its own rounds may say that a run is worse than those of the file were.
    steady = Baseline(value=0.0, runs=3, spread=0.001)
    assert gate_rule.is_slower(steady, [now])
    assert not gate_rule.is_slower(steady, [Run(value=now.value, noise=0.03)])


def test_a_run_that_is_as_before_clears_one_that_is_not() -> None:
    before = Baseline(value=0.0, runs=3, spread=0.002)
    bad, good = Run(value=-0.3, noise=0.001), Run(value=0.0, noise=0.001)
    assert gate_rule.is_slower(before, [bad])
    assert not gate_rule.is_slower(before, [bad, good])
    assert gate_rule.is_slower(before, [bad, bad])


def test_faster_is_never_slower() -> None:
    assert not gate_rule.is_slower(Baseline(value=0.0, runs=1, spread=0.0), [Run(value=1.0, noise=0.0)])


def test_rows_of_a_kind_tell_together_how_far_their_runs_lie_apart() -> None:
    def two(value: float, apart: float) -> list[Run]:
        return [Run(value=value + sign * apart / 2, noise=0.001) for sign in (-1, 1)]

    runs = {"a": two(0.0, 0.02), "b": two(1.0, 0.0), "c": two(0.0, 0.2)}
    found = gate_rule.baselines(runs, {"a": "kernel", "b": "kernel", "c": "decode"})
    assert found["a"].spread == found["b"].spread == pytest.approx(0.01)
    assert found["c"].spread == pytest.approx(0.2 / 2**0.5)
    assert (found["b"].value, found["b"].runs) == (pytest.approx(1.0), 2)


def test_a_baseline_is_not_moved_by_one_run_that_was_disturbed() -> None:
    runs = [Run(value=value, noise=0.001) for value in (0.0, 0.001, 0.4)]
    assert gate_rule.baselines({"a": runs}, {"a": "kernel"})["a"].value == 0.001


def test_one_run_says_nothing_of_others() -> None:
    found = gate_rule.baselines({"a": [Run(value=0.0, noise=0.001)]}, {"a": "kernel"})
    assert found["a"].spread == gate_rule.UNKNOWN_SPREAD
