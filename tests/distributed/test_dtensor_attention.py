"""Attention of DTensors in two processes: found on each one's share, and outputs and gradients are those of whole tensors."""

from __future__ import annotations

import pytest
import torch

from tests import numerics
from tests.distributed import dtensor_attention, processes
from tests.distributed.dtensor_attention import BATCH, HEADS, Case, Outcome
from tests.thinned import asked_for

CASES = [
    Case(name="heads"),
    Case(name="heads", inner="inductor"),
    Case(name="groups"),
    Case(name="batch"),
    Case(name="whole"),
    Case(name="written"),
    Case(name="bias"),
    Case(name="module"),
]
_FLOOR = 10 * numerics.FLOOR_ULPS[torch.float32] * torch.finfo(torch.float32).eps
_SHARES = {
    "batch": (BATCH // 2, HEADS),
    "written": (BATCH // 2, HEADS),
    "bias": (BATCH // 2, HEADS),
    "whole": (BATCH, HEADS),
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, Outcome]]:
    return processes.run(dtensor_attention.outcomes, asked_for(request, "case"))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_each_share_is_found_and_the_numbers_are_right(
    outcomes: list[dict[str, Outcome]], case: Case, rank: int
) -> None:
    found = outcomes[rank][str(case)]
    (report,) = found.reports
    (site,) = report.sites
    assert not report.misses
    assert site.spec.q.shape[:2] == _SHARES.get(case.name, (BATCH, HEADS // 2))
    assert site.decision.lowering == ("math" if case.name == "bias" else "sdpa_cpu_flash")
    for name, error in found.far.items():
        assert error <= _FLOOR, name


_PLACED = {"heads": "(Shard(dim=1),)", "batch": "(Shard(dim=0),)", "whole": "(Replicate(),)"}


@pytest.mark.parametrize("case", [Case(name=name) for name in _PLACED], ids=str)
@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_a_gradient_lies_as_its_tensor_does(outcomes: list[dict[str, Outcome]], case: Case, rank: int) -> None:
    found = outcomes[rank][str(case)].placements
    assert len(found) == 4
    assert {str(words) for words in found.values()} == {_PLACED[case.name]}
