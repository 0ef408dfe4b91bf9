"""Programs of the fuzzer's grammar: done again, every graph is the one that the passes made, and gives what eager gives."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter

import pytest

from tests.fuzz import comparing, searching
from tests.fuzz.comparing import Wrong
from tests.fuzz.discards import Left
from tests.fuzz.grammar.rules import RULES
from tests.fuzz.program import Program
from tests.fuzz.searching import Kind
from tests.passes.rewrites.watching import Seen, watched, without_times

SEED = 18
QUICK = ("views", "masks written", "several masks", "score kinds", "caller writes", "checkpoints")


def _checked(program: Program) -> list[Seen]:
    with warnings.catch_warnings(), watched() as seen:
        warnings.simplefilter("ignore")
        comparing.check(program)
    return seen


def _hold(rule: str, examples: int, *, dynamic: bool = False) -> Counter[str]:
    """Whether a second compilation of each program of a rule is the first one again."""
    counted: Counter[str] = Counter()
    for drawn in searching.draw(Kind(rule=rule), seed=SEED, examples=examples + 1)[1:]:
        # A check of the first call wants the passes.
        program = dataclasses.replace(drawn, verify=False, others=(), dynamic=drawn.dynamic or dynamic)
        try:
            first = _checked(program)
        except (Left, Wrong):  # The fuzzer's matter, not the cache's.
            counted["left"] += 1
            continue
        for before, after in zip(first, _checked(program), strict=True):
            if not before.ran or before.report.not_kept:
                counted["not kept"] += 1
                continue
            assert (after.report.from_cache, after.ran) == (True, ()), program.source
            assert after.code == before.code, program.source
            assert after.nodes == before.nodes, program.source
            assert after.guards == before.guards, program.source
            assert without_times(after.report) == without_times(before.report), program.source
            counted["graphs"] += 1
    return counted


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("rule", QUICK)
def test_programs_of_some_rules(rule: str) -> None:
    assert _hold(rule, 2)["graphs"] >= 1


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("rule", QUICK)
def test_programs_with_symbolic_sizes(rule: str) -> None:
    assert _hold(rule, 4, dynamic=True)["graphs"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_programs_of_every_rule(rule: str, dynamic: bool) -> None:
    counted = _hold(rule, 10, dynamic=dynamic)
    assert counted["graphs"] >= (3 if dynamic else 5), counted
