"""Models whose parameters are DTensors: attention on their local tensors is rewritten, its mask proved, and the numbers are right."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests import numerics
from tests.distributed import processes, tensor_parallel
from tests.distributed.tensor_parallel import HEADS, LAYERS, Case, Outcome
from tests.thinned import asked_for, further

CASES = [
    Case(way="hand"),
    Case(way="hand", impl="eager", padded=True, inner="eager"),
    # The same DTensors as by hand, whom AOTAutograd takes apart above.
    Case(way="auto", inner="eager"),
    Case(way="auto", impl="eager", inner="eager"),
    Case(way="sequence", padded=True),
    Case(way="fsdp"),
]
_FLOOR = numerics.FLOOR_ULPS[torch.float32] * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, Outcome]]:
    return processes.run(tensor_parallel.outcomes, asked_for(request, "case"))


@pytest.mark.parametrize("case", further(CASES, daily=[CASES[0], *CASES[4:]]), ids=str)
@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_every_layer_is_found_and_the_numbers_are_right(
    outcomes: list[dict[str, Outcome]], case: Case, rank: int
) -> None:
    found = outcomes[rank][str(case)]
    sites = [site for report in found.reports for site in report.sites]
    assert not [miss for report in found.reports for miss in report.misses]
    # Layers that are compiled one by one share their code.
    assert sum(len(site.modules) for site in sites) == (1 if case.way == "fsdp" else LAYERS)
    for site in sites:
        assert site.spec.q.shape[1] == HEADS // processes.SIZE
        assert site.spec.mask.words.startswith(_mask(case))
    for name, error in found.mine.items():
        assert error <= numerics.FACTOR * found.eager[name] + _FLOOR, name


def _mask(case: Case) -> str:
    """A layer of its own is told `is_causal`; in a whole model the mask is read."""
    if case.padded:
        return "causal ∧ key padding attention_mask[b, k] (proved)"
    return "causal" if case.way == "fsdp" else "causal (proved)"
