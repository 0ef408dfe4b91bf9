"""`verify` beside context parallelism: each rank's rows against the attention over the whole sequence, and what differs on all ranks."""

from __future__ import annotations

import pytest
import torch

from tests.context_parallel import against_one, models
from tests.context_parallel.against_one import Run
from tests.context_parallel.verified import REPLICATED, Checked, Outcome, outcomes
from tests.distributed import processes
from tests.thinned import asked_for, firsts, further

_WAYS = [(method, order) for method in ("all_gather", "all_to_all") for order in (None, "head_tail")]


def _every_way(case: str, fault: str = "", dtype: torch.dtype = torch.float64) -> list[Checked]:
    return [Checked(run=Run(case=case, method=m, load_balance=o), fault=fault, dtype=dtype) for m, o in _WAYS]


_RINGS = [
    Checked(run=Run(case="causal, right padding", method="ring", load_balance="head_tail")),
    Checked(run=Run(case="sinks", method="ring", load_balance=None), dtype=torch.bfloat16),
]
_WRONG_RINGS = [
    Checked(run=Run(case="causal", method="ring", load_balance=None), fault="positions off by the rank"),
    Checked(run=Run(case="ALiBi", method="ring", load_balance="head_tail"), fault="rank 0 twice"),
]
_RIGHT = [
    *_RINGS,
    *(Checked(run=run) for run in against_one.some(2, models.CASES)),
    Checked(run=Run(case="causal, right padding", method="all_gather", load_balance="head_tail", inner="inductor")),
    *_every_way("near, left padding")[:2],
    *_every_way("near, ALiBi", dtype=torch.bfloat16)[1:2],
    *_every_way(REPLICATED)[1:3],
    *_every_way("causal, 8 heads share 2", dtype=torch.bfloat16),
    *_every_way("softcap", dtype=torch.float32),
    *_every_way("sinks", dtype=torch.bfloat16)[::3],
    *_every_way("relative bias, learned", dtype=torch.bfloat16)[1:3],
]
_WRONG = [
    *_WRONG_RINGS,
    *_every_way("causal", "positions off by the rank"),
    *_every_way("ALiBi", "rank 0 twice"),
    *_every_way("none", "pieces swapped on rank 1")[2:],
    *_every_way("causal", "pieces swapped on rank 1"),
    *_every_way("right padding", "masks swapped on rank 1"),
]
_MISREAD = _every_way("causal", "scores read twice as large")[:1]
_FAILING = _every_way("causal", "the check fails on rank 1")[::3]


#: each way of sharing and each dtype once; test_against_one_process.py has each kind of mask and score, and Inductor
_DAILY_RIGHT = [
    *_RINGS,
    *firsts(_RIGHT[len(_RINGS) :], lambda one: (one.run.method, one.run.load_balance)),
    *firsts(_RIGHT, lambda one: one.dtype, lambda one: one.run.case == REPLICATED),
]
_DAILY_WRONG = [_WRONG_RINGS[0], *firsts(_WRONG, lambda one: one.fault, lambda one: one.run.load_balance)]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    every = asked_for(request, "one")
    return dict(zip((one.name for one in every), processes.run_each(outcomes, every), strict=True))


@pytest.mark.parametrize("one", further(_RIGHT, daily=_DAILY_RIGHT), ids=lambda one: one.name)
def test_what_is_right_holds_on_every_rank(found: dict[str, list[Outcome]], one: Checked) -> None:
    for outcome in found[one.name]:
        assert outcome.error is None
        outputs = [x for x in outcome.found if x.subject == "output"]
        assert len(outputs) == (4 if one.run.case == REPLICATED else 2)
        for x in outputs:
            assert x.skipped is None
            assert x.elements > 0
        skipped = {x.subject for x in outcome.found if x.skipped is not None}
        assert skipped == {"graph outputs", "graph gradients"}


@pytest.mark.parametrize("one", _RIGHT[len(_RINGS) :][:1], ids=lambda one: one.name)
def test_only_the_first_call_is_checked(found: dict[str, list[Outcome]], one: Checked) -> None:
    assert [outcome.again for outcome in found[one.name]] == [(), ()]


@pytest.mark.parametrize("one", further(_WRONG, daily=_DAILY_WRONG), ids=lambda one: one.name)
def test_a_fault_of_one_rank_is_raised_on_all(found: dict[str, list[Outcome]], one: Checked) -> None:
    first, second = found[one.name]
    assert first == second
    assert first.site is not None
    assert first.what is not None
    assert first.what.endswith("over the whole sequence")
    assert "on rank " in str(first.error)
    assert "compile without context_parallel" in str(first.error)


@pytest.mark.parametrize("one", _MISREAD, ids=lambda one: one.name)
def test_an_attention_that_was_misread_is_told_by_the_model_s_own_part(
    found: dict[str, list[Outcome]], one: Checked
) -> None:
    assert [outcome.what for outcome in found[one.name]] == ["attention as it was read"] * 2


@pytest.mark.parametrize("one", _FAILING, ids=lambda one: one.name)
def test_a_check_that_fails_on_one_rank_fails_on_all(found: dict[str, list[Outcome]], one: Checked) -> None:
    first, second = found[one.name]
    assert "rank 1: failed: " in str(first.error)
    assert "out of luck" in str(first.error)
    assert "out of luck" in str(second.error)
