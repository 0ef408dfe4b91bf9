"""A Llama of transformers on a mesh of two dimensions, and with its own gradient checkpointing.

Loss and gradients are those of one process with whole sequences.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.context_parallel import hf_layered
from tests.context_parallel.hf_layered import Run
from tests.context_parallel.layered import Result
from tests.distributed import processes

#: relative, of float32
_NEAR = 2e-6

_RUNS = [
    Run(way="tp", padded=True),
    Run(way="sp", padded=True),
    Run(way="tp", compiled="layers", hides_padding=True),
    Run(way="fsdp over all", compiled="layers", padded=True, hides_padding=True),
    Run(way="fsdp over dp", compiled="layers", hides_padding=True, method="all_gather"),
]
_CHECKPOINTED = [
    Run(way="alone", padded=True, checkpointed=False),
    Run(way="alone", padded=True, checkpointed=True, method="all_gather"),
    Run(way="alone", compiled="layers", padded=True, hides_padding=True, checkpointed=False),
    Run(way="fsdp over all", compiled="layers", padded=True, hides_padding=True, checkpointed=False),
]
_REFUSED = [
    Run(way="fsdp over all", compiled="layers", padded=True),
    # Of the ranks of a sequence one alone has padding.
    Run(way="fsdp over dp", compiled="layers"),
]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    runs = [*_RUNS, *_CHECKPOINTED, *_REFUSED]
    by_rank = processes.run(hf_layered.measured, runs, size=4)
    return {run.name: [found[i] for found in by_rank] for i, run in enumerate(runs)}


@pytest.mark.parametrize("run", [*_RUNS, *_CHECKPOINTED], ids=lambda run: run.name)
def test_four_ranks(results: dict[str, list[Result]], run: Run) -> None:
    for result in results[run.name]:
        assert result.error is None
        assert max(result.far.values()) < _NEAR, result.far
        assert result.sites == (1 if run.compiled == "layers" else 2)
        assert all("dense" not in mask or "proved" in mask for mask in result.masks), result.masks


@pytest.mark.parametrize("run", _REFUSED, ids=lambda run: run.name)
def test_a_mask_of_pairs_from_around_the_layers_is_refused_on_every_rank(
    results: dict[str, list[Result]], run: Run
) -> None:
    for result in results[run.name]:
        assert "compile the whole model in one graph, with attention_mask (batch, positions)" in str(result.error)
