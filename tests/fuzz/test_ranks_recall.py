"""What is told of a fault that was planted in both ranks."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.distributed import processes
from tests.fuzz import ranks, ranks_recall
from tests.fuzz.planted import sharing

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
