"""Random models on two processes that share a sequence: some of them here, more by `python -m tests.fuzz.ranks --programs 500`."""

from __future__ import annotations

import collections

import pytest

from tests.fuzz import ranks
from tests.fuzz.ranks import Program, Step

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
