"""Tensors, pipelines and masks over several processes."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.passes.recovering import recover
from attn_compiler.reporting.facts import SiteReport
from tests import numerics
from tests.distributed import dtensor_attention, pipeline_stages, processes, written_masks
from tests.distributed.dtensor_attention import BATCH, HEADS, Case, Outcome
from tests.distributed.pipeline_stages import LAYERS, WAYS, Outcome as StagesOutcome
from tests.distributed.written_masks import WHOLE, WRITES, Outcome as MasksOutcome
from tests.thinned import asked_for

# Attention of DTensors in two processes.
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


# Pipeline stages.
@pytest.fixture(scope="module")
def of_stages() -> list[dict[str, StagesOutcome]]:
    return processes.run(pipeline_stages.outcomes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_the_numbers_are_eagers(of_stages: list[dict[str, StagesOutcome]], way: str, rank: int) -> None:
    found = of_stages[rank][way]
    assert found.mine.keys() == found.eager.keys()
    assert ("out" in found.mine) == (rank == processes.SIZE - 1)
    assert ("layers.0.qkv.weight" in found.mine) == (way != "mask sent")
    for name, mine in found.mine.items():
        torch.testing.assert_close(mine, found.eager[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_every_attention_of_a_stage_is_found_and_its_mask_known(
    of_stages: list[dict[str, StagesOutcome]], rank: int
) -> None:
    (site,) = _sites(of_stages[rank]["stages"])
    assert site.modules == tuple(f"layers.{i}" for i in range(LAYERS))
    assert site.spec.mask.words.startswith("causal ∧ key padding keep[b, k] (proved)")
    assert site.spec.needs_grad


@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_layers_know_a_mask_that_compiled_code_made(of_stages: list[dict[str, StagesOutcome]], rank: int) -> None:
    # Layers share their code. Only the first one of the first stage is given an x without a gradient.
    sites = _sites(of_stages[rank]["layers"])
    assert len(sites) == (LAYERS if rank == 0 else 1)
    assert all("causal ∧ key padding mask[b, 0, 11, k] (proved)" in site.spec.mask.words for site in sites)


@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_a_mask_of_other_code_stays_dense_with_a_remedy(of_stages: list[dict[str, StagesOutcome]], rank: int) -> None:
    for site in _sites(of_stages[rank]["layers, mask made outside"]):
        assert site.spec.mask.words.startswith("dense bool")
        assert recover.COMES_IN in site.notes


def test_a_mask_that_is_sent_on_is_known_where_it_was_made(
    of_stages: list[dict[str, StagesOutcome]],
) -> None:
    (made,), (received,) = (_sites(outcome["mask sent"]) for outcome in of_stages)
    assert "causal ∧ key padding given[b, k] (proved)" in made.spec.mask.words
    assert received.spec.mask.words.startswith("dense additive")
    assert recover.COMES_IN in received.notes


def _sites(found: StagesOutcome) -> list[SiteReport]:
    assert not [miss for report in found.reports for miss in report.misses]
    return [site for report in found.reports for site in report.sites]


# After a collective, a send or a receive a mask means what it holds.
@pytest.fixture(scope="module")
def of_masks() -> list[dict[str, MasksOutcome]]:
    return processes.run(written_masks.outcomes)


@pytest.fixture(scope="module")
def in_one_function() -> list[dict[str, float]]:
    return processes.run(written_masks.in_one_function)


@pytest.mark.parametrize("name", WRITES)
def test_a_mask_that_was_written_means_what_it_holds(of_masks: list[dict[str, MasksOutcome]], name: str) -> None:
    found = [outcome[name] for outcome in of_masks]
    assert any(one.is_changed for one in found)
    for one in found:
        assert one.was_known
        assert one.off < 1e-5
        assert not (one.is_changed and one.is_known)


@pytest.mark.parametrize("name", WHOLE)
def test_in_compiled_code_too(in_one_function: list[dict[str, float]], name: str) -> None:
    assert all(off[name] < 1e-5 for off in in_one_function)
