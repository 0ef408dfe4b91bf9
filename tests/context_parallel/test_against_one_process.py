"""Several ranks compute what one process computes, outputs and gradients."""

from __future__ import annotations

import pytest

from tests.context_parallel import against_one, models
from tests.context_parallel.against_one import Result, Run
from tests.thinned import asked_for, further

#: of float64
_EXACT = 1e-12

#: a few with Inductor, whose code has the collectives among its kernels
_INDUCTOR = [
    Run(case="causal, right padding", method="all_gather", load_balance="head_tail", inner="inductor"),
    Run(case="window wider than a part", method="all_to_all", load_balance=None, inner="inductor"),
]
#: and with AOTAutograd, whose graphs have the collectives' own ops
_TRACED = [
    Run(case="causal documents", method="all_to_all", load_balance="head_tail", inner="aot_eager"),
    Run(case="relative bias, learned", method="all_gather", load_balance=None, inner="aot_eager"),
    Run(case="sinks", method="all_to_all", load_balance=None, inner="aot_eager"),
]
_TWO = [*against_one.some(2, models.CASES), *_TRACED, *_INDUCTOR]
_FOUR_CASES = (
    "causal",
    "causal, right padding",
    "window wider than a part",
    "causal documents",
    "relative bias, learned",
    "sinks",
)
_FOUR = against_one.some(4, {name: models.CASES[name] for name in _FOUR_CASES})
_ALL = [run for run in against_one.everything(2, models.CASES) if run not in _TWO]


def _check(results: list[Result]) -> None:
    for result in results:
        assert result.error < _EXACT
        assert result.gradient_error < _EXACT
        assert result.sites == 2
        assert all("dense" not in mask or "proved" in mask for mask in result.masks), result.masks
        begins = ("context parallel: all_", "context parallel: halo of")
        assert all(any(note.startswith(begins) for note in result.notes) for _ in result.masks)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    return against_one.results(asked_for(request, "run", _TWO), 2)


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    return against_one.results(asked_for(request, "run", _FOUR), 4)


@pytest.fixture(scope="module")
def every() -> dict[str, list[Result]]:
    return against_one.results(_ALL, 2)


#: each third has the four ways in turn
_DAILY = [*_TWO[: -len(_TRACED + _INDUCTOR) : 3], _TRACED[0], _INDUCTOR[0]]


@pytest.mark.parametrize("run", further(_TWO, daily=_DAILY), ids=lambda run: run.name)
def test_two_ranks(two: dict[str, list[Result]], run: Run) -> None:
    _check(two[run.name])


@pytest.mark.parametrize("run", further(_FOUR, daily=_FOUR[1:2]), ids=lambda run: run.name)
def test_four_ranks(four: dict[str, list[Result]], run: Run) -> None:
    _check(four[run.name])


@pytest.mark.slow
@pytest.mark.parametrize("run", _ALL, ids=lambda run: run.name)
def test_every_way(every: dict[str, list[Result]], run: Run) -> None:
    _check(every[run.name])
