"""The simulation of the gate: it has to tell a steady machine from one that the rule can do nothing for."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from benchmarks import gate_power
from benchmarks.gate_rule import OURS, PEER

KINDS = {"a": "kernel", "b": "kernel"}


def runs(within: float, between: float, count: int = 6) -> list[dict[str, dict[str, list[float]]]]:
    chance = random.Random(1)
    found = []
    for _ in range(count):
        run = {}
        for name in KINDS:
            off = chance.gauss(0, between)
            run[name] = {OURS: [1.0] * 40, PEER: [math.exp(off + chance.gauss(0, within)) for _ in range(40)]}
        found.append(run)
    return found


def test_a_steady_machine_catches_five_percent_without_false_alarms() -> None:
    powers, of_all = gate_power.simulate(gate_power.noises(runs(0.01, 0.002), KINDS), 3, trials=300)
    assert of_all == 0
    for power in powers:
        assert power.caught == 1
        assert power.least is not None
        assert 0.03 <= power.least <= 0.05


def test_noise_costs_power_and_makes_few_alarms() -> None:
    powers, of_all = gate_power.simulate(gate_power.noises(runs(0.01, 0.03), KINDS), 3, trials=300)
    assert of_all <= 0.03
    assert all(power.caught < 0.5 for power in powers)
    assert all(power.least is None or power.least > 0.08 for power in powers)


def test_one_run_is_refused() -> None:
    with pytest.raises(ValueError, match="two runs"):
        gate_power.noises(runs(0.01, 0.01, count=1), KINDS)


def test_a_row_that_failed_in_a_run_is_left_out() -> None:
    some = runs(0.01, 0.002)
    some[2]["b"] = {"failure": "no"}  # type: ignore[dict-item]
    assert list(gate_power.noises(some, KINDS)) == ["a"]


def test_the_command_says_whether_the_power_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_power.gate_cases, "rows", lambda device: [_row(name) for name in KINDS])
    for name, between, status in (("steady", 0.002, 0), ("noisy", 0.05, 1)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(runs(0.01, between)))
        assert gate_power.main([str(path), "--trials", "200"]) == status


def _row(name: str) -> gate_power.gate_cases.Row:
    return gate_power.gate_cases.Row(name=name, kind="kernel", peer="inductor", make=lambda device: lambda seconds: {})
