"""Models of transformers as they are, on two ranks: outputs and gradients are those of one process."""

from __future__ import annotations

import pytest

from tests.context_parallel import hf_models
from tests.context_parallel.hf_models import Found
from tests.distributed import processes
from tests.thinned import asked_for, further

#: of float64; norms and softmax of some models are float32's
_EXACT = {"gpt-oss": 1e-7}
#: layers that gather, and layers that exchange a halo
_DAILY = ("Llama", "gpt-oss")
#: how many of a model's two layers exchange one
_HALOS = {"Mistral, halos": 2, "gpt-oss": 1, "Llama": 0}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Found]]:
    names = asked_for(request, "name")
    return dict(zip(names, processes.run_each(hf_models.measured, names, size=2), strict=True))


@pytest.mark.parametrize("name", further(hf_models.CASES, daily=_DAILY))
def test_two_ranks_compute_what_one_process_computes(found: dict[str, list[Found]], name: str) -> None:
    for one in found[name]:
        assert one.error < _EXACT.get(name, 1e-12)
        assert one.gradient_error < _EXACT.get(name, 1e-12)
        assert one.sites == 2


@pytest.mark.parametrize("name", further(hf_models.CASES, daily=_DAILY))
def test_each_attention_is_verified(found: dict[str, list[Found]], name: str) -> None:
    for one in found[name]:
        assert one.verified == ("mask", "output")
        assert one.skipped == ("graph gradients", "graph outputs")


@pytest.mark.parametrize("name", further(_HALOS, daily=_DAILY))
def test_layers_with_a_window_exchange_a_halo_beside_those_that_gather(
    found: dict[str, list[Found]], name: str
) -> None:
    assert {one.halos for one in found[name]} == {_HALOS[name]}
