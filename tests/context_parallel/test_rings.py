"""Keys and values of one rank after the other, merged: outputs and gradients are those of one process, in every form."""

from __future__ import annotations

import pytest

from tests.context_parallel import against_one, models, ring_models
from tests.context_parallel.against_one import Result, Run
from tests.distributed import processes
from tests.thinned import asked_for, further

#: of float64
_EXACT = 1e-12


def _ring(case: str, order: str | None, inner: str = "eager") -> Run:
    return Run(case=case, method="ring", load_balance=order, inner=inner)


_TWO = [
    _ring("left padding", "head_tail"),
    _ring("window wider than a part", None),
    _ring("prefix", "head_tail"),
    _ring("ALiBi", None),
    _ring("softcap", "head_tail"),
    _ring("causal, 8 heads share 1", None),
]
#: with AOTAutograd and with Inductor, whose graphs have the collectives themselves; test_against_one_process.py has Inductor by default
_COMPILED = [
    _ring("causal documents", None, "aot_eager"),
    _ring("relative bias, learned", None, "aot_eager"),
    _ring("sinks", "head_tail", "inductor"),
]
_FOUR = [_ring("causal, right padding", "head_tail"), _ring("sinks", None)]
_ALL = [run for case in models.CASES for order in (None, "head_tail") if (run := _ring(case, order)) not in _TWO]
#: of which a rank's parts near the queries are less than a ring keeps
_HALOS = ("window", "chunks")


def _check(run: Run, results: list[Result], size: int) -> None:
    is_halo = run.load_balance is None and run.case in _HALOS
    each = 1 if is_halo else size * (2 if run.load_balance is not None and run.case != "none" else 1)
    for result in results:
        assert result.error < _EXACT
        assert result.gradient_error < _EXACT
        assert result.sites == 2 * each
        assert all("dense" not in mask or "proved" in mask for mask in result.masks), result.masks
        begins = f"context parallel: {'halo of' if is_halo else 'ring over'}"
        assert sum(note.startswith(begins) for note in result.notes) == len(result.masks)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    return against_one.results(asked_for(request, "run", [*_TWO, *_COMPILED]), 2)


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    return against_one.results(asked_for(request, "run", _FOUR), 4)


@pytest.fixture(scope="module")
def every() -> dict[str, list[Result]]:
    return against_one.results(_ALL, 2)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("run", _TWO, ids=lambda run: run.name)
def test_two_ranks(two: dict[str, list[Result]], run: Run) -> None:
    _check(run, two[run.name], 2)


@pytest.mark.parametrize("run", further(_COMPILED, daily=_COMPILED[:1]), ids=lambda run: run.name)
def test_two_ranks_with_compiled_collectives(two: dict[str, list[Result]], run: Run) -> None:
    _check(run, two[run.name], 2)


@pytest.mark.parametrize("run", further(_FOUR, daily=_FOUR[1:]), ids=lambda run: run.name)
def test_four_ranks(four: dict[str, list[Result]], run: Run) -> None:
    _check(run, four[run.name], 4)


@pytest.mark.parametrize("inner", further(["eager", "inductor"], daily=["eager"]))
def test_without_gradients(inner: str) -> None:
    for found in processes.run(ring_models.without_gradients, "causal, right padding", inner):
        assert found.error < _EXACT
        assert found.uses == {"read"}


#: attentions that two layers become: gpt-oss has a window in one of its two, of which the halo is less than a ring keeps
_HF = {"Llama": 8, "BERT": 8, "gpt-oss": 5}


@pytest.mark.further
def test_models_of_transformers_are_verified_in_rings() -> None:
    for found in processes.run(ring_models.of_transformers, list(_HF)):
        for (name, parts), one in zip(_HF.items(), found, strict=True):
            assert one.error < (1e-7 if name == "gpt-oss" else _EXACT)
            assert one.gradient_error < (1e-7 if name == "gpt-oss" else _EXACT)
            assert one.sites == parts
            assert one.verified == ("mask", "output")


@pytest.mark.slow
@pytest.mark.parametrize("run", _ALL, ids=lambda run: run.name)
def test_every_form(every: dict[str, list[Result]], run: Run) -> None:
    _check(run, every[run.name], 2)
