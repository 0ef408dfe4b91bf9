"""Packed documents on two ranks: each stays by itself, wherever its borders are, and what can't know of them is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from tests.context_parallel import hf_packed
from tests.context_parallel.hf_packed import Run
from tests.context_parallel.layered import Result
from tests.distributed import processes
from tests.thinned import asked_for, further, in_full

#: each rank's part, in the order of the sequence, is one document
_ALIGNED = ((12, 12), (12, 12))
# With AOTAutograd, which takes as long as everything else, one of each method; `-m slow` has it everywhere.
_RUNS = [
    Run(inner="aot_eager"),
    Run(load_balance=None),
    Run(method="all_to_all"),
    Run(documents=_ALIGNED, load_balance=None),
    Run(documents=_ALIGNED, method="all_to_all", checkpointed=True, inner="aot_eager"),
    # Ends are padded, and documents of one position are there.
    Run(documents=((1, 1, 20, 3), (25,))),
    Run(documents=((1, 1, 20, 3), (25,)), load_balance=None, inner="inductor"),
]
#: each order once, with documents that end inside of a part and at its end
_DAILY = [_RUNS[0], _RUNS[3]]
_REFUSED = {
    Run(documents=_ALIGNED, load_balance=None, compiled="layers"): "reads where they begin",
    Run(documents=_ALIGNED, load_balance=None, compiled="layers", packed=False): "packed=True",
    Run(documents=_ALIGNED, load_balance=None, packed=False): "packed=True",
    Run(compiled="layers"): "compile the whole model in one graph",
}
_FURTHER = [replace(run, inner="aot_eager") for run in _RUNS if run.inner == "eager"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    runs = asked_for(request, "run")
    return dict(zip((run.name for run in runs), processes.run_each(hf_packed.measured, runs), strict=True))


@pytest.mark.parametrize("run", [*further(_RUNS, daily=_DAILY), *in_full(_FURTHER, daily=())], ids=lambda run: run.name)
def test_two_ranks(results: dict[str, list[Result]], run: Run) -> None:
    for result in results[run.name]:
        assert result.error is None
        # Norms of a Llama are float32's, and Inductor computes them in its own way.
        assert max(result.far.values()) < (1e-6 if run.inner == "inductor" else 1e-12), result.far
        assert result.sites == 2
        assert all("proved" in mask for mask in result.masks), result.masks


@pytest.mark.parametrize("run", further(_REFUSED, daily=list(_REFUSED)[:2]), ids=lambda run: run.name)
def test_what_does_not_know_of_documents_is_refused_on_every_rank(results: dict[str, list[Result]], run: Run) -> None:
    for result in results[run.name]:
        assert _REFUSED[run] in str(result.error)
