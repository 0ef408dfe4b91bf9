"""The gate of benchmarks: cases, rules."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import bench_mla, decode_cases, gate, gate_cases, gate_rule, harness, select_cases
from benchmarks.gate import Found
from benchmarks.gate_rule import OURS, PEER, Baseline, Run

# The gate's command, with rows that take no time.
ROWS = tuple(
    gate_cases.Row(
        name=name, kind="kernel", peer="inductor", make=lambda device: lambda seconds: {OURS: [1.0], PEER: [2.0]}
    )
    for name in ("fast", "even")
)
RATIOS = {"fast": 2.0, "even": 1.0}
WHERE = {"date": "2026-11-23", "commit": "abc", "device": "none", "threads": "1", "torch": "2.13", "transformers": "5"}


def measured(seed: int, *, slower: dict[str, float] | None = None, noise: float = 0.005) -> Found:
    """What a process would give. slower: rows of which ours takes so many times as long."""
    chance = random.Random(seed)
    found: Found = {}
    for name, ratio in RATIOS.items():
        ours = (slower or {}).get(name, 1.0)
        pairs = [(ours * math.exp(chance.gauss(0, noise)), ratio) for _ in range(30)]
        found[name] = {OURS: [pair[0] for pair in pairs], PEER: [pair[1] for pair in pairs]}
    return found


class Processes:
    """Stands for fresh processes: each call gives what the next one would measure."""

    def __init__(self, *runs: Found) -> None:
        self.runs, self.asked = list(runs), list[list[str]]()

    def __call__(self, names: Sequence[str]) -> Found:
        self.asked.append(list(names))
        run = self.runs.pop(0)
        return {name: found for name, found in run.items() if not names or name in names}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "gate_none.csv"
    gate.write(path, [measured(seed) for seed in range(3)], ROWS, WHERE)
    assert gate.written(path) == 0
    return path


def test_what_is_written_is_read_as_it_was(kept: Path) -> None:
    before = gate.baselines_of(harness.read(kept))
    assert {name: baseline.runs for name, baseline in before.items()} == {"fast": 3, "even": 3}
    assert math.exp(before["fast"].value) == pytest.approx(2.0, rel=0.003)
    assert 0 < before["fast"].spread < 0.005


@pytest.mark.parametrize(
    ("runs", "verdicts", "asked"),
    [
        ([measured(7)], ["ok", "ok"], [[]]),
        # what fell by 5% is measured again, and forgiven if one run was disturbed
        ([measured(7, slower={"even": 1.05}), measured(8, slower={"even": 1.05})], ["ok", "SLOWER"], [[], ["even"]]),
        ([measured(7, slower={"even": 1.05}), measured(8)], ["ok", "ok"], [[], ["even"]]),
        # what failed or is missing is no pass
        (
            [{"fast": {"failure": "RuntimeError: no"}}],
            ["FAILED: RuntimeError: no", "FAILED: it was not measured"],
            [[]],
        ),
    ],
)
def test_verdicts(runs: list[Found], verdicts: list[str], asked: list[list[str]], kept: Path) -> None:
    processes = Processes(*runs)
    found = gate.compare(gate.baselines_of(harness.read(kept)), processes)
    assert [row["verdict"] for row in found] == verdicts
    assert processes.asked == asked
    if "SLOWER" in verdicts:
        assert (found[1]["row"], found[1]["runs"]) == ("even", "2")
        assert float(found[1]["decline"].rstrip("%")) == pytest.approx(4.8, abs=0.5)


def test_a_failure_of_one_row_is_written_and_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(device: str) -> gate_cases.Timing:
        raise RuntimeError("no such kernel\nand more")

    rows = (ROWS[0], gate_cases.Row(name="broken", kind="kernel", peer="inductor", make=broken))
    found = gate.measure_here(rows, "cpu", 0.0)
    assert found == {"fast": {OURS: [1.0], PEER: [2.0]}, "broken": {"failure": "RuntimeError: no such kernel"}}
    gate.write(tmp_path / "g.csv", [found], rows, WHERE)
    assert gate.written(tmp_path / "g.csv") == 1
    assert "FAILED broken: RuntimeError: no such kernel" in capsys.readouterr().out


def test_the_command_writes_and_compares_in_processes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = [measured(seed, slower={"fast": 1.1}) for seed in (8, 9)]
    processes = Processes(*(measured(seed) for seed in (0, 1, 2, 7)), *slower)
    monkeypatch.setattr(gate, "fresh_process", lambda device, seconds: processes)
    monkeypatch.setattr(gate_cases, "rows", lambda device: ROWS)
    threads = torch.get_num_threads()
    output, rounds = tmp_path / "g.csv", tmp_path / "rounds.json"
    command = ["--device", "cpu", "--output", str(output), "--rounds", str(rounds), "--commit", "abc"]
    try:
        assert gate.main(command) == 2
        assert gate.main([*command, "--write", "--runs", "3"]) == 0
        assert len(json.loads(rounds.read_text())) == 3
        assert gate.main(command) == 0
        assert gate.main(command) == 1
    finally:
        torch.set_num_threads(threads)
    assert len(json.loads(rounds.read_text())) == 2
    said = capsys.readouterr().out
    assert "SLOWER" in said
    assert "not the same machine" not in said


def test_no_run_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes 10 s here."""
    now = [0.0]

    def run(names: Sequence[str]) -> Found:
        now[0] += 10.0
        return measured(0)

    monkeypatch.setattr(gate.time, "monotonic", lambda: now[0])
    assert len(list(gate.repeated(run, 5, end=35.0))) == 3
    assert len(list(gate.repeated(run, 5, end=0.0))) == 1
    assert len(list(gate.repeated(run, 2, end=1e9))) == 2


def test_rows_are_compiled_before_each_by_itself() -> None:
    processes = Processes(measured(0), measured(1))
    gate.warm(["fast", "even"], processes, 1)
    assert processes.asked == [["fast"], ["even"]]


def test_other_versions_are_named() -> None:
    assert gate.other_versions([WHERE], WHERE) == []
    assert gate.other_versions([WHERE], {**WHERE, "torch": "2.14"}) == ["torch: 2.13 in the file, 2.14 here"]


def test_a_file_is_called_by_its_device() -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla V100")
    assert [gate.device_kind(name) for name in names] == ["h200", "h100", "a100", "v100"]


# The gate's rows.
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_there_is_some_of_every_kind_and_no_name_twice(device: str) -> None:
    rows = gate_cases.rows(device)
    assert {row.kind for row in rows} == {"kernel", "decode", "end to end", "first step"}
    assert len({row.name for row in rows}) == len(rows)
    # What reads the rounds of several runs knows rows by their names alone.
    kinds = {row.name: row.kind for row in gate_cases.rows("cpu")}
    assert all(kinds.get(row.name, row.kind) == row.kind for row in rows)


def test_both_sides_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short steps are called several times in a row, and the times are those of one call."""
    called: list[str] = []

    def step(side: str) -> torch.Tensor:
        called.append(side)
        return torch.ones(())

    monkeypatch.setattr(gate_cases, "_times", lambda step: 3)
    timed = gate_cases.in_turn({side: functools.partial(step, side) for side in (OURS, PEER)}, "cpu")
    monkeypatch.setattr(
        harness, "interleave", lambda steps, *given, **named: {s: [6.0] for s in steps if steps[s]() is not None}
    )
    assert timed(0.0) == {OURS: [2.0], PEER: [2.0]}
    assert called == [OURS] * 3 + [PEER] * 3


def test_a_turn_is_long_enough_for_the_clock() -> None:
    assert gate_cases._times(lambda: torch.ones(())) > 100
    slow = torch.ones(700, 700)
    assert gate_cases._times(lambda: [slow @ slow for _ in range(20)][-1]) == 1


def test_whole_models_are_short() -> None:
    model, given = gate_cases.model_of("bert", "eager", "train_padded", "cpu")
    assert model.training
    assert len(model.encoder.layer) == 2
    assert given["input_ids"].shape == given["attention_mask"].shape == (1, 128)
    assert not given["attention_mask"].all()


def test_names_of_cases_are_known() -> None:
    """What a row of a GPU reads when it is made, which no machine without one does."""
    assert {"causal_d128_s2048", "padded_d64_s2048"} <= select_cases.BY_NAME.keys()
    assert {"b16_4k_half", "b1_32k"} <= decode_cases.BY_NAME.keys()
    assert {"v2_lite_b1_4k"} <= {case.name for case in bench_mla.GPU_CASES}
    assert {"small_b1_256"} <= {case.name for case in bench_mla.SMALL_CASES}


# When a ratio counts as lower than it was.
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


def test_what_is_faster_or_says_nothing_is_never_slower() -> None:
    for run in (Run(value=1.0, noise=0.0), Run(value=-0.5, noise=math.inf)):
        assert not gate_rule.is_slower(Baseline(value=0.0, runs=1, spread=0.0), [run])


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
