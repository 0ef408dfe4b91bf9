"""A compilation that not all ranks make is an error on all of them, at once, and they may go on together."""

from __future__ import annotations

import re

import pytest

from tests.context_parallel import recompiling
from tests.context_parallel.recompiling import OPTIONS, OTHERS, Outcome
from tests.distributed import processes
from tests.thinned import asked_for, in_full

#: the group's own timeout is minutes
_SECONDS = 20
#: what one rank does otherwise, and which rank. By default each rank has a quarter of what there is.
_WAYS = in_full(
    ((name, who) for name in OTHERS for who in (0, 1)),
    daily={(name, at % 2) for at, name in enumerate(list(OTHERS)[::2])},
)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[tuple[str, int], Outcome]]:
    return processes.run(recompiling.measured, None, asked_for(request, "way"))


@pytest.fixture(scope="module")
def of_options(request: pytest.FixtureRequest) -> list[dict[str, Outcome]]:
    return processes.run(recompiling.with_other_options, asked_for(request, "name"))


@pytest.mark.parametrize("way", _WAYS)
def test_all_ranks_raise_and_say_what_differs(
    found: list[dict[tuple[str, int], Outcome]], way: tuple[str, int]
) -> None:
    name, _ = way
    for outcomes in found:
        outcome = outcomes[way]
        assert outcome.error is not None
        assert re.search(OTHERS[name][1], outcome.error), outcome.error
        assert outcome.seconds < _SECONDS


@pytest.mark.parametrize("way", _WAYS)
def test_the_error_names_the_rank(found: list[dict[tuple[str, int], Outcome]], way: tuple[str, int]) -> None:
    _, who = way
    waiting = found[1 - who][way].error
    assert waiting is not None
    assert f"rank {who}: co" in waiting  # "compiles", "could not compile"
    assert f"rank {1 - who}: runs graph" in waiting


@pytest.mark.parametrize("way", _WAYS)
def test_ranks_go_on_together(found: list[dict[tuple[str, int], Outcome]], way: tuple[str, int]) -> None:
    assert all(outcomes[way].after for outcomes in found)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_on_one_rank_are_refused_by_name(of_options: list[dict[str, Outcome]], name: str) -> None:
    option = name.split(" ")[0]
    for outcomes in of_options:
        outcome = outcomes[name]
        assert outcome.error is not None
        assert f"{option}: " in outcome.error
        assert outcome.seconds < _SECONDS
