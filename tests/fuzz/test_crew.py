"""Processes of the fuzzer, ranks among them, and its command line."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from tests.distributed import processes
from tests.fuzz import __main__ as fuzz, crew, ranks, ranks_recall, recall_rows
from tests.fuzz.crew import Ended, Limits, Lost, Spent, Tell
from tests.fuzz.grammar.rules import RULES
from tests.fuzz.planted import sharing
from tests.fuzz.ranks import Program, Step
from tests.fuzz.recall_rows import Row


# Processes that are lost cost their job, and nothing else.
@dataclass(frozen=True)
class Do:
    what: str

    def run(self, tell: Tell) -> None:
        tell(f"began {self.what}")
        if self.what == "sleep":
            time.sleep(60)
        if self.what == "exit":
            os._exit(3)
        if self.what == "raise":
            raise ValueError("as asked")
        if self.what == "spend":
            raise Spent
        if self.what == "hold":
            held = bytearray(5 << 28)
            time.sleep(60)
            del held
        os.write(1, b"a line\n" * 20)


@pytest.mark.further
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_job_comes_to_an_end(method: str, tmp_path: Path) -> None:
    # A fork begins with all that this process has loaded.
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if method == "fork" else 0
    memory = (1 << 30) + pages * os.sysconf("SC_PAGE_SIZE")
    limits = Limits(processes=2, method=method, silence=12.0, memory=memory, renewed=2, logs=tmp_path)
    jobs = [Do(what) for what in ("a", "exit", "raise", "spend", "hold", "sleep", "b", "c", "d")]
    told = list(crew.events(iter(jobs), limits))
    assert [job for job, x in told if isinstance(x, str)] != []
    ends = {job.what: x for job, x in told if isinstance(x, Ended | Lost)}
    assert ends.keys() == {job.what for job in jobs}
    assert all(ends[name] == Ended() for name in "abcd")
    assert ends["raise"] == Ended(text="ValueError: as asked")
    assert ends["spend"] == Ended(spent=True)
    kinds = {name: x.kind for name, x in ends.items() if isinstance(x, Lost)}
    assert kinds == {"exit": "crash", "hold": "memory", "sleep": "hang"}
    assert "with 3" in str(ends["exit"].text)
    assert "in run" in str(ends["sleep"].text)


# A small fixed budget of the fuzzer.

#: programs of each rule
EACH = (1, pytest.param(4, marks=pytest.mark.slow))


@pytest.mark.further
@pytest.mark.parametrize("each", EACH)
def test_nothing_goes_wrong(each: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = [
        "--programs",
        str(each * len(RULES)),
        "--batch",
        str(each),
        "--seed",
        "17",
        "--processes",
        "1",
        "--minutes",
        "60",
    ]
    code = fuzz.main([*options, "--out", str(tmp_path / "found"), "--report", str(report)])
    tally = json.loads(report.read_text())
    found = "\n".join(path.read_text() for path in (tmp_path / "found").glob("*.py")) if code else ""
    assert code == 0, found
    assert tally["rules"].keys() == RULES.keys()
    assert tally["different"] == tally["total"]["programs"] > 0.8 * each * len(RULES)
    lowered = tally["lowered"]
    assert sum(lowered.values()) > 20, lowered
    assert min(lowered.get(name, 0) for name in ("sdpa_cpu_flash", "reference", "math")) >= each, lowered
    assert tally["total"]["compared"] > 0.6 * tally["total"]["programs"], tally["total"]


# Random models on two processes that share a sequence.
_COUNT = 40


@pytest.mark.further
def test_random_models_are_equal_to_one_process_or_refused() -> None:
    found = ranks.run(3, _COUNT)
    wrong = [(program, said) for program, said in found if ranks.kind_of(said) == "wrong"]
    assert not wrong
    tally = collections.Counter(ranks.kind_of(said) for _, said in found)
    assert tally["equal"] >= _COUNT // 8, tally
    assert tally["refused"] >= _COUNT // 8, tally


def test_a_seed_gives_the_same_programs() -> None:
    assert ranks.drawn(5, 20) == ranks.drawn(5, 20)
    assert ranks.drawn(5, 20) != ranks.drawn(6, 20)


def test_every_step_is_drawn() -> None:
    steps = [step for program in ranks.drawn(1, 3000) for step in (*program.before, *program.after)]
    assert {step.source for step in steps} == {*ranks.NUMBERS, *ranks.COUNTED, *ranks.OTHERS}
    assert {step.sink for step in steps if step.sink} == {*ranks.SINKS, *ranks.TENSOR_SINKS}
    assert {program.ending for program in ranks.drawn(1, 1000)} == set(ranks.ENDINGS)


def test_ranks_that_say_something_else_are_wrong() -> None:
    assert ranks.kind_of(["equal", "equal"]) == "equal"
    assert ranks.kind_of(["refused: a", "refused: b"]) == "refused"
    assert ranks.kind_of(["equal", "refused: a"]) == "wrong"
    assert ranks.kind_of(["equal", "wrong: 0.1"]) == "wrong"


def test_a_program_says_all_that_it_needs() -> None:
    step = Step(kind="number", source="S - 1", sink="times")
    program = Program(before=(step,), after=(), mask="flag", constant=2, length=8, method="auto", balanced=False)
    assert eval(repr(program)) == program


# What is told of a fault that was planted in both ranks.
PROGRAMS = ranks.drawn(0, 60)


def _row(*said: list[str]) -> tuple[str, str, int, int]:
    """What a row has of a fault, of which processes said this, in turn."""
    with mock.patch.object(processes, "run", side_effect=[[list(said), list(said)] for said in said]) as run:
        row = ranks_recall.tried(sharing.ALL[0], PROGRAMS)
    assert run.call_args_list[0].args[2] == PROGRAMS[:25]
    return row.found, row.by, row.programs, row.place


def test_a_fault_is_found_by_the_first_program_that_is_wrong() -> None:
    right = ["equal", "refused: why"] * 12 + ["equal"]
    assert _row(right, ["equal"] * 3 + ["wrong: 1"] + ["equal"] * 21) == ("wrong", "ranks", 29, 28)
    assert _row(right, right, right[:10]) == ("", "", 60, 59)


@pytest.mark.parametrize("fault", sharing.ALL, ids=[f.name for f in sharing.ALL])
def test_faults_are_in_functions_that_every_rank_has_imported(fault: sharing.Fault) -> None:
    assert fault.place() is not None
    assert fault.source()


# The table of planted faults.
ROW = Row(
    fault="a, b",
    file="x.py",
    within="f",
    rule="masks",
    found="wrong",
    by="views",
    programs=3,
    place=7,
    seconds=1.5,
    minutes_of_two_cores=0.25,
)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, head = tmp_path / "recall.csv", recall_rows.about(seed=1, rounds=2, programs=3)
    other = dataclasses.replace(ROW, fault="c", found="")
    recall_rows.write(path, head, {"c": other, "a, b": ROW})
    assert recall_rows.read(path, head) == {"a, b": ROW, "c": other}
    assert recall_rows.read(path, recall_rows.about(seed=2, rounds=2, programs=3)) == {}
    assert recall_rows.read(tmp_path / "none.csv", head) == {}


def test_the_commit_alone_makes_no_other_code(tmp_path: Path) -> None:
    path = tmp_path / "recall.csv"
    recall_rows.write(path, "# code: 1; commit: a; seed 1", {"a, b": ROW})
    assert recall_rows.read(path, "# code: 1; commit: b; seed 1") != {}
    assert recall_rows.read(path, "# code: 2; commit: a; seed 1") == {}


def test_the_summary_says_what_was_not_found() -> None:
    text = recall_rows.summary([ROW, dataclasses.replace(ROW, fault="c", found="")], 4)
    assert text.splitlines()[0] == "recall: 1 of 4 faults, 25.0%; 2 not tried"
    assert "not found: c (x.py, f)" in text
