"""The gate's command, with rows that take no time; a planted slower ratio has to be named."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gate, gate_cases, gate_rule, harness
from benchmarks.gate import Found
from benchmarks.gate_rule import OURS, PEER

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


def test_the_same_again_is_ok_after_one_run(kept: Path) -> None:
    processes = Processes(measured(7))
    verdicts = gate.compare(gate.baselines_of(harness.read(kept)), processes)
    assert [row["verdict"] for row in verdicts] == ["ok", "ok"]
    assert processes.asked == [[]]


def test_a_planted_five_percent_is_named_after_a_second_run(kept: Path) -> None:
    planted = {"even": 1.05}
    processes = Processes(measured(7, slower=planted), measured(8, slower=planted))
    verdicts = {row["row"]: row for row in gate.compare(gate.baselines_of(harness.read(kept)), processes)}
    assert verdicts["even"]["verdict"] == "SLOWER"
    assert verdicts["even"]["runs"] == "2"
    assert float(verdicts["even"]["decline"].rstrip("%")) == pytest.approx(4.8, abs=0.5)
    assert verdicts["fast"]["verdict"] == "ok"
    assert processes.asked == [[], ["even"]]


def test_a_run_that_was_disturbed_is_forgiven(kept: Path) -> None:
    processes = Processes(measured(7, slower={"even": 1.05}), measured(8))
    verdicts = gate.compare(gate.baselines_of(harness.read(kept)), processes)
    assert [row["verdict"] for row in verdicts] == ["ok", "ok"]


def test_a_row_that_fails_or_is_missing_is_no_pass(kept: Path) -> None:
    run = {**measured(7), "fast": {"failure": "RuntimeError: no"}}
    del run["even"]
    verdicts = gate.compare(gate.baselines_of(harness.read(kept)), Processes(run))
    assert [row["verdict"] for row in verdicts] == ["FAILED: RuntimeError: no", "FAILED: it was not measured"]


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
    runs = [measured(seed) for seed in range(3)] + [
        measured(7),
        *(measured(seed, slower={"fast": 1.1}) for seed in (8, 9)),
    ]
    processes = Processes(*runs)
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100", "v100"),
    ],
)
def test_a_file_is_called_by_its_device(name: str, kind: str) -> None:
    assert gate.device_kind(name) == kind


def test_a_run_that_says_nothing_of_a_row_is_never_slower() -> None:
    assert not gate_rule.is_slower(
        gate_rule.Baseline(value=0.0, runs=1, spread=0.01), [gate_rule.Run(value=-0.5, noise=math.inf)]
    )
