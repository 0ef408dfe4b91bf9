"""Every benchmark: its command says what it takes, it has cases, and the smallest one runs on a CPU. And errors of linear attention."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("transformers")

from attn_compiler.spec.target import Target
from benchmarks import bench_host, harness, linear_errors
from benchmarks.bench_host import Timed
from benchmarks.harness import Bench

FOLDER = Path(harness.__file__).parent
COMMANDS = sorted(path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
BENCHES = [name for name in COMMANDS if "BENCH = Bench(" in (FOLDER / f"{name}.py").read_text()]
#: what a CPU measures of them in seconds, or says why not
SMALLEST = {
    "bench_compile_cost": "--models bert --layers 1 --passes-alone --implementations sdpa --scenarios prefill",
    "bench_cpu_lengths": "--cases avx2?attention?padding?float32?yes?1?16 --seconds 0",
    "bench_host": "--dry-run",
    "bench_linear": "--only gated --head-dim 16 --longest 1 --seconds 0",
    "bench_memory": "--cases bert/sdpa/prefill --size small --device cpu --seconds 0",
    "bench_shared_prompts": "--dry-run --layers 1 --cases Llama*step --sides shared --seconds 0",
    "linear_errors": "--recurrences delta --dtypes float32 --lengths 3",
}


def module(name: str) -> object:
    return importlib.import_module(f"benchmarks.{name}")


def parsed(bench: Bench, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for names, settings in bench.every_option:
        parser.add_argument(*names, **settings)
    return bench.given(parser.parse_args(words))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "first_step":
        pytest.skip("a process of bench_first_step, which takes JSON")
    with pytest.raises(SystemExit) as ended:
        module(name).main(["--help"])  # type: ignore[attr-defined]
    assert ended.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", BENCHES)
def test_cases_have_names_of_their_own_and_columns_for_them(name: str) -> None:
    bench: Bench = module(name).BENCH  # type: ignore[attr-defined]
    given = parsed(bench)
    found = [tuple(case.names.items()) for case in bench.cases(given)]
    assert found
    assert bench.together or len(set(found)) == len(found)
    columns = {*bench.named_columns(given)}
    assert {column for case in found for column, _ in case} <= columns
    given.device, given.commit = "cpu", "abc"
    columns |= {*(bench.where or (lambda given: harness.environment("cpu")))(given)}
    assert {*bench.short} <= columns
    path = harness.RESULTS / (bench.results(given) if callable(bench.results) else bench.results)
    assert not path.exists() or {*harness.read(path)[0]} <= columns, "a column of the committed rows is lost"


@pytest.mark.further
@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_case_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Times are of few calls: whether it is slower says nothing."""
    path = tmp_path / "rows.csv"
    words = [*SMALLEST[name].split(), "--output", str(path), "--commit", "abc"]
    assert module(name).main(words) in (0, 1)  # type: ignore[attr-defined]
    rows = harness.read(path)
    assert rows
    assert {row.get("failure", "") for row in rows} == {""}
    assert "WRONG" not in {row.get("numerics") for row in rows}


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


@pytest.mark.parametrize("recurrence", linear_errors.RECURRENCES)
def test_a_row_for_each_quantity(recurrence: str) -> None:
    call = linear_errors.Call(recurrence=recurrence, dtype="float32", length=5, steps=(0.1, 1.0))
    found = list(linear_errors.measure(call, argparse.Namespace(device="cpu", lowering="linear_reference")))
    quantities = {row["quantity"] for row in found}
    assert {"out", "state", "grad of first"} < quantities
    assert len(quantities) == len(found)
    assert {row["lowering"] for row in found} == {"linear_reference"}
    assert {*found[0]} == {*linear_errors.COLUMNS}
    assert not any(map(linear_errors.is_off, found))


@pytest.mark.parametrize(
    ("lowering", "ratio", "off"),
    [
        ("linear_reference", "2.00", False),
        ("linear_reference", "2.01", True),
        ("linear_reference", "nan", True),
        ("", "1.00", True),
    ],
)
def test_rows_that_break_the_rule(lowering: str, ratio: str, off: bool) -> None:
    assert linear_errors.is_off({"lowering": lowering, "ratio": ratio}) == off
