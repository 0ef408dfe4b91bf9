"""Pipeline stages: each attention is found in its stage, what is known of its mask, and the schedule's numbers are eager's."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.passes.recovering import recover
from attn_compiler.reporting.facts import SiteReport
from tests.distributed import pipeline_stages, processes
from tests.distributed.pipeline_stages import LAYERS, WAYS, Outcome


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    return processes.run(pipeline_stages.outcomes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_the_numbers_are_eagers(outcomes: list[dict[str, Outcome]], way: str, rank: int) -> None:
    found = outcomes[rank][way]
    assert found.mine.keys() == found.eager.keys()
    assert ("out" in found.mine) == (rank == processes.SIZE - 1)
    assert ("layers.0.qkv.weight" in found.mine) == (way != "mask sent")
    for name, mine in found.mine.items():
        torch.testing.assert_close(mine, found.eager[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_every_attention_of_a_stage_is_found_and_its_mask_known(outcomes: list[dict[str, Outcome]], rank: int) -> None:
    (site,) = _sites(outcomes[rank]["stages"])
    assert site.modules == tuple(f"layers.{i}" for i in range(LAYERS))
    assert site.spec.mask.words.startswith("causal ∧ key padding keep[b, k] (proved)")
    assert site.spec.needs_grad


@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_layers_know_a_mask_that_compiled_code_made(outcomes: list[dict[str, Outcome]], rank: int) -> None:
    # Layers share their code. Only the first one of the first stage is given an x without a gradient.
    sites = _sites(outcomes[rank]["layers"])
    assert len(sites) == (LAYERS if rank == 0 else 1)
    assert all("causal ∧ key padding mask[b, 0, 11, k] (proved)" in site.spec.mask.words for site in sites)


@pytest.mark.parametrize("rank", range(processes.SIZE))
def test_a_mask_of_other_code_stays_dense_with_a_remedy(outcomes: list[dict[str, Outcome]], rank: int) -> None:
    for site in _sites(outcomes[rank]["layers, mask made outside"]):
        assert site.spec.mask.words.startswith("dense bool")
        assert recover.COMES_IN in site.notes


def test_a_mask_that_is_sent_on_is_known_where_it_was_made(outcomes: list[dict[str, Outcome]]) -> None:
    (made,), (received,) = (_sites(outcome["mask sent"]) for outcome in outcomes)
    assert "causal ∧ key padding given[b, k] (proved)" in made.spec.mask.words
    assert received.spec.mask.words.startswith("dense additive")
    assert recover.COMES_IN in received.notes


def _sites(found: Outcome) -> list[SiteReport]:
    assert not [miss for report in found.reports for miss in report.misses]
    return [site for report in found.reports for site in report.sites]
