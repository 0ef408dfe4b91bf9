"""The families: that the list is complete, and that what it says of each model is so."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.hf.counting import AttentionCounter
from tests.hf.family import Family, Size, set_dropout
from tests.hf.outputs import run
from tests.hf.packages import Unavailable
from tests.hf.scenarios import SCENARIO, prepare
from tests.hf.survey import FAMILIES, FAMILY, cases

REQUIRED = {
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "bloom",
    "mpt",
    "falcon",
    "gpt_oss",
    "olmo2",
    "deepseek_v3",
    "cohere",
    "bert",
    "roberta",
    "distilbert",
    "modernbert",
    "vit",
    "clip",
    "swin",
    "t5",
    "bart",
    "whisper",
    "mha_self",
    "encoder",
    "timm_vit",
    "diffusers_dit",
}
FROM_TRANSFORMERS = [
    family for family in FAMILIES if "eager" in family.impls and family.name not in ("timm_vit", "diffusers_dit")
]


def _build(family: Family, impl: str) -> torch.nn.Module:
    try:
        return family.build(impl).eval()
    except Unavailable as missing:
        pytest.skip(str(missing))


def test_every_family_of_the_promise_is_there() -> None:
    assert FAMILY.keys() >= REQUIRED


def test_case_names_are_unique() -> None:
    names = [case.id for case in cases()]
    assert len(names) == len(set(names))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_sites_by_formula_are_those_that_run(family: Family) -> None:
    for impl in family.impls:
        model = _build(family, impl)
        counter = AttentionCounter()
        with torch.no_grad(), counter:
            model(**family.inputs(Size()))
        assert counter.sites == family.sites, (impl, counter.calls)


@pytest.mark.parametrize("family", FROM_TRANSFORMERS, ids=lambda family: family.name)
def test_what_is_said_to_have_no_sdpa_has_none(family: Family) -> None:
    model = _build(family, "eager")
    # Bloom and MPT predate the flag: transformers counts them as without.
    assert model._supports_sdpa == ("sdpa" in family.impls)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    ("name", "scenario"), [(family.name, scenario) for family in FAMILIES for scenario in family.uncaptured]
)
def test_what_is_said_to_be_left_to_python_never_reaches_a_backend(name: str, scenario: str) -> None:
    """Any backend: this one runs each graph as it is, and counts what is in it."""
    family = FAMILY[name]
    captured = AttentionCounter()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        def run_counted(*args: Any) -> Any:
            with captured:
                return gm.forward(*args)

        return run_counted

    trial = prepare(family, SCENARIO[scenario], "eager", "fp32")
    run(trial, trial.model, torch.compile(trial.model, backend=backend))
    total = family.expected(scenario) * SCENARIO[scenario].calls
    assert captured.sites == total - family.uncaptured[scenario].sites


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_mask_matters(family: Family) -> None:
    """A padded case whose mask changed nothing would not notice a lost mask."""
    if not family.mask:
        pytest.skip("no padding mask")
    impl = family.impls[-1]
    try:
        padded = prepare(family, SCENARIO["padded"], impl, "fp32")
    except Unavailable as missing:
        pytest.skip(str(missing))
    assert padded.valid is not None
    masked = run(padded, padded.model, padded.model)
    unmasked = run(
        padded, padded.model, lambda **kwargs: padded.model(**{k: v for k, v in kwargs.items() if k != family.mask})
    )
    differences = [(masked[name] - unmasked[name]).abs().max() / masked[name].abs().max() for name in masked]
    assert max(differences) > 1e-2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_dropout_is_off_where_results_are_compared_and_on_in_its_own_scenario(family: Family) -> None:
    model = _build(family, family.impls[-1]).train()
    inputs = family.inputs(Size())

    def first(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    set_dropout(model, 0.0)
    assert torch.equal(first(0), first(1))
    set_dropout(model, 0.2)
    assert not torch.equal(first(0), first(1))


def test_a_missing_package_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_timm(name: str, package: str | None = None) -> object:
        if name == "timm":
            raise ModuleNotFoundError("No module named 'timm'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_timm)
    with pytest.raises(Unavailable, match="timm does not import: No module named 'timm'"):
        FAMILY["timm_vit"].build("sdpa")
