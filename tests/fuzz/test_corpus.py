"""The programs that planted faults are looked for with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tests.fuzz import corpus, crew, searching
from tests.fuzz.comparing import Outcome, Wrong
from tests.fuzz.corpus import Known, Mistaken, Turn
from tests.fuzz.crew import Ended, Limits
from tests.fuzz.discards import Left
from tests.fuzz.test_program import PLAIN

LIMITS = Limits(processes=1, method="fork", renewed=1)


@pytest.mark.parametrize(
    ("raised", "kind"), [(None, Known), (Left("why"), type(None)), (Wrong("wrong", "far"), Mistaken)]
)
def test_a_program_is_known_says_nothing_or_is_wrong(raised: Exception | None, kind: type) -> None:
    with mock.patch.object(searching, "judged", side_effect=raised, return_value=Outcome()):
        assert type(corpus._observed(PLAIN, 1.0)) is kind


def test_what_is_wrong_without_a_fault_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    known = Known(program=PLAIN, ran=frozenset(), lowered=frozenset(), seconds=0.0)
    other = dataclasses.replace(known, program=dataclasses.replace(PLAIN, rule="views"))

    def events(turns: Iterator[Turn], _: Limits) -> Iterator[tuple[Turn, Any]]:
        first, second = turns
        yield second, other
        yield first, Mistaken(program=PLAIN, text="off by 7")
        yield first, known
        yield first, Ended(text=None)

    with mock.patch.object(crew, "events", events):
        assert corpus.programs(seed=1, rounds=1, limits=LIMITS, rules=("views", "sinks")) == [known, other]
    said = capsys.readouterr().out
    assert "wrong without any fault: off by 7" in said
    assert PLAIN.lines[0] in said
