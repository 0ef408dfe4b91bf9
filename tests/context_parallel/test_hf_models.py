"""Models of transformers over several processes: layered and packed ones, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.context_parallel import hf_layered, hf_packed
from tests.context_parallel.hf_layered import Run
from tests.context_parallel.hf_packed import Run as RunPacked
from tests.context_parallel.layered import Result
from tests.distributed import processes
from tests.thinned import asked_for, further, in_full

pytest.importorskip("transformers")

# A Llama of transformers on a mesh of two dimensions, and with its own gradient checkpointing.

#: relative, of float32
_NEAR = 2e-6

# Each way of sharing has AOTAutograd, which takes as long as everything else, here or in test_layered.py; `-m slow` has it everywhere.
_RUNS = [
    Run(way="tp", padded=True, inner="aot_eager"),
    Run(way="sp", padded=True),
    Run(way="tp", compiled="layers", hides_padding=True),
    Run(way="fsdp over all", compiled="layers", padded=True, hides_padding=True, inner="aot_eager"),
    Run(way="fsdp over dp", compiled="layers", hides_padding=True, method="all_gather"),
]
_CHECKPOINTED = [
    # Ranks that share nothing else need no mesh of two dimensions.
    Run(way="alone", padded=True, checkpointed=False, inner="aot_eager", ranks=2),
    Run(way="alone", padded=True, checkpointed=True, method="all_gather", ranks=2),
    Run(way="alone", compiled="layers", padded=True, hides_padding=True, checkpointed=False, ranks=2),
    Run(way="fsdp over all", compiled="layers", padded=True, hides_padding=True, checkpointed=False),
]
_REFUSED = [
    Run(way="alone", compiled="layers", padded=True, ranks=2),
    Run(way="fsdp over all", compiled="layers", padded=True),
    # Of the ranks of a sequence one alone has padding.
    Run(way="fsdp over dp", compiled="layers"),
]


#: a checkpoint, and what is refused, on two ranks: to compile a Llama on four takes as long as all ways of sharing of test_layered.py
_DAILY = [_CHECKPOINTED[0], _REFUSED[0]]


def _in_full(runs: list[Run]) -> list[Any]:
    more = dict.fromkeys(replace(run, ranks=4, inner="aot_eager") for run in runs)
    return [*further(runs, daily=_DAILY), *in_full((run for run in more if run not in runs), daily=())]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    return processes.results_by_name(hf_layered.measured, asked_for(request, "run"))


@pytest.mark.parametrize("run", _in_full([*_RUNS, *_CHECKPOINTED]), ids=lambda run: run.name)
def test_ranks_compute_what_one_process_computes(results: dict[str, list[Result]], run: Run) -> None:
    for result in results[run.name]:
        assert result.error is None
        assert max(result.far.values()) < _NEAR, result.far
        assert result.sites == (1 if run.compiled == "layers" else 2)
        assert all("dense" not in mask or "proved" in mask for mask in result.masks), result.masks


@pytest.mark.parametrize("run", _in_full(_REFUSED), ids=lambda run: run.name)
def test_a_mask_of_pairs_from_around_the_layers_is_refused_on_every_rank(
    results: dict[str, list[Result]], run: Run
) -> None:
    for result in results[run.name]:
        assert "compile the whole model in one graph, with attention_mask (batch, positions)" in str(result.error)


# Packed documents on two ranks.

#: each rank's part, in the order of the sequence, is one document
_ALIGNED = ((12, 12), (12, 12))
# With AOTAutograd, which takes as long as everything else, one of each method; `-m slow` has it everywhere.
_PACKED_RUNS = [
    RunPacked(inner="aot_eager"),
    RunPacked(load_balance=None),
    RunPacked(method="all_to_all"),
    RunPacked(documents=_ALIGNED, load_balance=None),
    RunPacked(documents=_ALIGNED, method="all_to_all", checkpointed=True, inner="aot_eager"),
    # Ends are padded, and documents of one position are there.
    RunPacked(documents=((1, 1, 20, 3), (25,))),
    RunPacked(documents=((1, 1, 20, 3), (25,)), load_balance=None, inner="inductor"),
]
#: each order once, with documents that end inside of a part and at its end
_PACKED_DAILY = [_PACKED_RUNS[0], _PACKED_RUNS[3]]
_PACKED_REFUSED = {
    RunPacked(documents=_ALIGNED, load_balance=None, compiled="layers"): "reads where they begin",
    RunPacked(documents=_ALIGNED, load_balance=None, compiled="layers", packed=False): "packed=True",
    RunPacked(documents=_ALIGNED, load_balance=None, packed=False): "packed=True",
    RunPacked(compiled="layers"): "compile the whole model in one graph",
}
_FURTHER = [replace(run, inner="aot_eager") for run in _PACKED_RUNS if run.inner == "eager"]


@pytest.fixture(scope="module")
def results_packed(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    runs = asked_for(request, "run")
    return dict(zip((run.name for run in runs), processes.run_each(hf_packed.measured, runs), strict=True))


@pytest.mark.parametrize(
    "run", [*further(_PACKED_RUNS, daily=_PACKED_DAILY), *in_full(_FURTHER, daily=())], ids=lambda run: run.name
)
def test_two_ranks(results_packed: dict[str, list[Result]], run: RunPacked) -> None:
    for result in results_packed[run.name]:
        assert result.error is None
        # Norms of a Llama are float32's, and Inductor computes them in its own way.
        assert max(result.far.values()) < (1e-6 if run.inner == "inductor" else 1e-12), result.far
        assert result.sites == 2
        assert all("proved" in mask for mask in result.masks), result.masks


@pytest.mark.parametrize("run", further(_PACKED_REFUSED, daily=list(_PACKED_REFUSED)[:2]), ids=lambda run: run.name)
def test_what_does_not_know_of_documents_is_refused_on_every_rank(
    results_packed: dict[str, list[Result]], run: RunPacked
) -> None:
    for result in results_packed[run.name]:
        assert _PACKED_REFUSED[run] in str(result.error)
