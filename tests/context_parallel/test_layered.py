"""Context parallelism beside tensor parallelism, FSDP2 and checkpoints: loss and gradients are those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.context_parallel import layered
from tests.context_parallel.layered import LAYERS, Result, Run
from tests.distributed import processes
from tests.thinned import asked_for, firsts, further, in_full

#: of float64
_EXACT = 1e-12

# AOTAutograd takes as long as everything else, Inductor three times as long. Each way of sharing and of checkpoints has AOTAutograd here,
# and so has each method; the rewritten graphs of the other runs run op by op. `-m slow` has what is left out.
_HEADS = [
    Run(way="tp"),
    Run(way="tp", method="all_to_all", heads=(8, 4), masked=True, inner="eager"),
    Run(way="tp", method="auto", heads=(4, 4), compiled="layers", inner="eager"),
    Run(way="tp", load_balance=None, masked="model", inner="eager"),
    Run(way="tp, cp last", method="auto", heads=(8, 2), masked=True, compiled="layers"),
    Run(way="tp, DTensors"),
    Run(way="tp, DTensors", method="all_to_all", heads=(4, 4), load_balance=None, compiled="layers", inner="eager"),
    Run(way="tp and fsdp", masked=True, compiled="layers"),
    Run(way="tp", masked=True, compiled="layers", inner="inductor"),
]
_SHARDS = [
    Run(way="fsdp over dp", compiled="layers", masked=True),
    Run(way="fsdp over all", method="all_to_all", compiled="layers"),
    Run(way="fsdp over all", compiled="layers", load_balance=None, masked=True, inner="eager"),
    Run(way="fsdp, replicas", method="auto", compiled="layers", masked=True),
    Run(way="fsdp over dp", inner="eager"),
    Run(way="fsdp over all", method="auto", masked=True),
]
# PyTorch 2.13 can't compile a checkpoint around DTensors: it would save their mesh.
_AROUND_DTENSORS = Run(way="tp", checkpointed=False, masked=True, inner="eager")
_CHECKPOINTS = [
    # Ranks that share nothing else need no mesh of two dimensions.
    Run(way="alone", checkpointed=False, ranks=2),
    Run(way="alone", checkpointed=True, method="all_to_all", heads=(8, 4), masked=True, ranks=2),
    Run(way="alone", checkpointed=False, masked="model", load_balance=None, heads=(8, 1), inner="eager", ranks=2),
    Run(way="alone", checkpointed=False, masked=True, method="all_to_all", heads=(4, 4), inner="inductor", ranks=2),
    Run(way="alone", checkpointed=False, masked="model", inner="inductor", ranks=2),
    Run(way="alone", checkpointed=False, masked=True, inner="eager", ranks=2),
    Run(way="alone", checkpointed=False, masked=True, compiled="checkpoints", ranks=2),
    Run(way="alone", checkpointed=True, compiled="layers", masked=True, ranks=2),
    _AROUND_DTENSORS,
    Run(way="tp", checkpointed=False, masked=True, compiled="layers"),
    Run(way="fsdp over all", checkpointed=False, compiled="layers", masked=True),
]
#: the first one is run by default: tests/context_parallel/test_rings.py has AOTAutograd on two ranks, test_against_one_process.py Inductor
_RINGS = [
    Run(way="tp", method="ring", compiled="layers", masked=True, inner="eager"),
    Run(way="alone", checkpointed=False, method="ring", heads=(8, 2), compiled="layers", masked=True),
    Run(way="tp", method="ring", compiled="layers", masked=True),
    Run(way="fsdp over all", method="ring", compiled="layers", masked=True),
    Run(way="alone", checkpointed=False, method="ring", load_balance=None, masked="model", inner="inductor"),
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    return processes.results_by_name(layered.measured, asked_for(request, "run"))


@pytest.mark.parametrize("run", in_full(_RINGS, daily=_RINGS[:1]), ids=lambda run: run.name)
def test_four_ranks_of_a_ring(results: dict[str, list[Result]], run: Run) -> None:
    for result in results[run.name]:
        assert result.error is None
        assert max(result.far.values()) < _EXACT, result.far
        layers = 1 if run.compiled == "layers" else LAYERS
        ranks = 2 if "tp" in run.way or "fsdp" in run.way else 4
        assert result.verified == layers
        assert result.sites == layers * ranks * (1 if run.load_balance is None else 2)


#: each way of sharing once, where there is a choice with layers that are compiled one by one, which traces half as much; each kind of
#: checkpoint, of whole models. test_against_one_process.py has Inductor
_DAILY = [
    *firsts(
        sorted([*_HEADS, *_SHARDS], key=lambda run: run.compiled != "layers" or run.inner == "inductor"),
        lambda r: r.way,
    ),
    *firsts(_CHECKPOINTS, lambda run: run.checkpointed),
]


def _in_full(runs: list[Run]) -> list[Any]:
    """And on four ranks each, with AOTAutograd, of which the checkpoint around DTensors has none."""
    more = [replace(run, ranks=4, inner="eager" if run == _AROUND_DTENSORS else "aot_eager") for run in runs]
    more += [replace(run, compiled="whole", ranks=4) for run in runs if run.inner == "inductor"]
    return [*further(runs, daily=_DAILY), *in_full(dict.fromkeys(run for run in more if run not in runs), daily=())]


@pytest.mark.parametrize("run", _in_full([*_HEADS, *_SHARDS, *_CHECKPOINTS]), ids=lambda run: run.name)
def test_ranks_compute_what_one_process_computes(results: dict[str, list[Result]], run: Run) -> None:
    for result in results[run.name]:
        assert result.error is None
        assert max(result.far.values()) < _EXACT, result.far
        # Layers that are compiled one by one share their code; FSDP's hooks leave a whole model to its layers.
        is_shared = run.compiled != "whole" or run.way.startswith("fsdp")
        # The first layer of reentrant checkpoints is compiled for an input without a gradient, too.
        assert result.sites in ((1, LAYERS) if run.checkpointed and is_shared else (1 if is_shared else LAYERS,))
        assert all("dense" not in mask or "proved" in mask for mask in result.masks), result.masks


@pytest.mark.parametrize("run", _in_full([*_HEADS, *_SHARDS, *_CHECKPOINTS]), ids=lambda run: run.name)
def test_each_attention_is_verified(results: dict[str, list[Result]], run: Run) -> None:
    for result in results[run.name]:
        assert result.skipped == ()
        assert result.verified == result.sites


@pytest.mark.parametrize("run", _in_full(_HEADS), ids=lambda run: run.name)
def test_each_rank_has_its_share_of_the_heads(results: dict[str, list[Result]], run: Run) -> None:
    exchanged = run.method == "all_to_all" or (run.method == "auto" and run.heads[1] % 4 == 0)
    for result in results[run.name]:
        assert set(result.heads) == {run.heads[0] // (4 if exchanged else 2)}


#: what one rank finds wrong is raised while the first graph is compiled or runs, and a layer's is smaller than the model's
_ONE_LAYER = Run(way="tp", compiled="layers")


def test_an_error_for_some_heads_is_one_on_every_rank() -> None:
    """The others would wait for it in the collectives of tensor parallelism."""
    own, others = "this rank has heads that it can take", "all ranks compile the same graph"
    found = processes.run(layered.failing_for_some_heads, _ONE_LAYER, size=4)
    assert [str(one.error).count(own) > 0 for one in found] == [False, True, False, True]
    assert [str(one.error).count(others) > 0 for one in found] == [True, False, True, False]


@pytest.mark.further
def test_a_mismatch_for_some_heads_is_raised_on_every_rank() -> None:
    found = processes.run(layered.misplaced_for_some_heads, _ONE_LAYER, size=4)
    assert len({one.error for one in found}) == 1
    assert "over the whole sequence is not the model's own" in str(found[0].error)
    assert "on rank 1" in str(found[0].error)
