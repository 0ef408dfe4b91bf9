"""What a call costs the host: every case runs, numbers are of one call, and rows say what they are of."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip(
    "transformers", reason="a row has the version of transformers' environment: pip install -e '.[models]'"
)

import torch

from attn_compiler.spec.target import Target
from benchmarks import bench_host, harness
from benchmarks.bench_host import Timed


def test_every_op_has_a_row_in_compiled_code_and_one_of_its_body() -> None:
    found = [timed.what for timed in bench_host.everything("cpu", Target.fake())]
    ours = [what for what in found if ": " in what]
    bodies = {what.removesuffix("body") for what in ours if what.endswith("body")}
    assert bodies == {what.removesuffix("in compiled code") for what in ours if what.endswith("in compiled code")}
    assert {what.split(",")[0] for what in bodies} == {"decode", "decode over a latent", "triton"}
    assert found[:2] == found[-2:], "the machine's pace before and after"


def test_a_number_is_of_one_call() -> None:
    calls: list[int] = []
    timed = Timed(what="it", function=calls.append, arguments=(1,), planned=contextlib.nullcontext)
    assert bench_host.microseconds(timed, burst=5, bursts=4, device="cpu") < 1000
    assert len(calls) == 3 + 20


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    def some(*_: object) -> list[Timed]:
        good = Timed(what="torch.empty", function=torch.empty, arguments=(8,), planned=contextlib.nullcontext)
        return [good, Timed(what="fails", function=fail, arguments=(), planned=contextlib.nullcontext)]

    monkeypatch.setattr(bench_host, "everything", some)
    path = tmp_path / "host.csv"
    for run in ("1", "2"):
        with pytest.raises(RuntimeError, match="no"):
            bench_host.main(["--run", run, "--output", str(path), "--commit", "abc"])
    rows = harness.read(path)
    assert [(row["run"], row["what"], row["commit"]) for row in rows] == [
        ("1", "torch.empty", "abc"),
        ("2", "torch.empty", "abc"),
    ]
    assert all(float(row["us"]) > 0 for row in rows)
