"""`generate` with every sort of cache, with an assistant, and compiled in every way that people try: what is found, as many graphs as
Dynamo makes, and eager's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

import attn_compiler
from attn_compiler.integrations.transformers import compile_model
from tests.integrations import launching
from tests.integrations.launching import DECODER, LAYERS, found, graphs_without_us, llama, prompts

TOKENS = 6  # as in the recipes
OPTIONS = {"inner": "eager", "strict": True}
WINDOW = {"sliding_window": 6}


def _mistral() -> Any:
    """Windows in every layer."""
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, **WINDOW)).eval()


def _gemma() -> Any:
    """A window in the first layer, none in the second: a hybrid cache."""
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**DECODER, **WINDOW, layer_types=layers)).eval()


def _gemma2() -> Any:
    """Spelled out, with a softcap."""
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma2Config(**DECODER, **WINDOW, layer_types=layers)
    return transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()


def _generate(model: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the logits that they were chosen by."""
    given = {**prompts(), "max_new_tokens": TOKENS, "do_sample": False, **settings}
    result = model.generate(**given, output_logits=True, return_dict_in_generate=True)
    return result.sequences, torch.stack(result.logits)


def _same(mine: tuple[Tensor, Tensor], eager: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(mine[0], eager[0])
    torch.testing.assert_close(mine[1], eager[1])


def _of_attention() -> list[Any]:
    """The reports of graphs that have attention."""
    return [report for report in attn_compiler.reports() if report.sites]


_PADDING = "key padding attention_mask[b, k] (proved)"
_GIVEN = "key padding attention_mask[b, 0, 0, k] (proved)"
_LAST_ROW = "key padding attention_mask[b, 0, 8, k] (proved)"
_WINDOW = "causal ∧ window (5 back) ∧ key padding attention_mask[b, k] (proved)"

#: model, cache → the masks of each graph in turn. A step has the padding of all keys that are left. A prompt's mask in a static cache comes
#: in, and says itself which keys are padding: in its last row, or in each key's own.
CASES: dict[str, tuple[Callable[[], Any], str | None, list[str]]] = {
    "growing": (
        llama,
        None,
        [
            f"9: causal ∧ {_PADDING}",
            f"1: {_PADDING}",
            "1: key padding attention_mask[b, k] ∧ keys up to s (proved)",
            f"1: {_PADDING}",
        ],
    ),
    "static": (llama, "static", [f"9: causal ∧ {_LAST_ROW}", f"1: {_GIVEN}"]),
    "windows static": (
        _mistral,
        "static",
        ["9: causal ∧ window (5 back) ∧ key padding attention_mask[b, 0, k, k] (proved)", f"1: {_GIVEN}"],
    ),
    "hybrid growing": (
        _gemma,
        None,
        [
            f"9: {_WINDOW}",
            f"9: causal ∧ {_PADDING}",
            *["1: key padding attention_mask.to[b, k + s - 5] (proved)", f"1: {_PADDING}"] * 2,
        ],
    ),
    "hybrid static": (
        _gemma,
        "static",
        [
            "9: causal ∧ window (5 back) ∧ key padding sliding_attention[b, 0, k, k] (proved)",
            "9: causal ∧ key padding full_attention[b, 0, 8, k] (proved)",
            "1: key padding sliding_attention[b, 0, 0, k] (proved)",
            "1: key padding full_attention[b, 0, 0, k] (proved)",
        ],
    ),
}


@pytest.mark.in_turns(3)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("case", CASES)
def test_a_model_that_is_compiled_in_place(case: str) -> None:
    make, cache, masks = CASES[case]
    model = make()
    model.generation_config.cache_implementation = cache
    eager = _generate(model)
    given = launching.run("generate", model=model, inputs=prompts())
    assert torch.equal(given["tokens"], eager[0])
    assert found(sites=LAYERS) == masks
    compiled, graphs = len(attn_compiler.reports()), len(_of_attention())
    assert graphs == (2 if cache else 3)
    # A prompt's masks in a static cache are graphs of their own: of windows, and of all keys.
    assert compiled - graphs == (0 if cache is None else 2 if make is _gemma else 1)
    # Another call, as long: nothing is compiled anew.
    _same(_generate(model), eager)
    assert len(attn_compiler.reports()) == compiled
    if case in ("growing", "hybrid static"):
        assert graphs_without_us(lambda: _generate(model)) == compiled


@pytest.mark.usefixtures("quick")
def test_transformers_compiles_the_steps_of_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # It does so by itself on accelerators only.
    monkeypatch.setattr(transformers.CompileConfig, "_compile_all_devices", True)
    model = llama()
    eager = _generate(model, cache_implementation="static", disable_compile=True)
    given = launching.run("generate with a static cache, compiled by transformers", model=model, inputs=prompts())
    assert torch.equal(given["tokens"], eager[0])
    assert found(sites=LAYERS) == [f"1: {_GIVEN}"]
    assert len(attn_compiler.reports()) == 1


def test_transformers_finds_a_model_that_is_compiled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it compiles steps itself, it compiles what a call of the model does: that is ours already."""
    others: list[torch.fx.GraphModule] = []

    def other(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
        others.append(gm)
        return gm.forward

    monkeypatch.setattr(transformers.CompileConfig, "_compile_all_devices", True)
    config = transformers.CompileConfig(backend=other, mode=None)
    model = compile_model(llama(), options=OPTIONS)
    _generate(model, cache_implementation="static", compile_config=config)
    assert [site.spec.seqlen_q for report in attn_compiler.reports() for site in report.sites] == [9, 1]
    assert others == []


@pytest.mark.parametrize("cache", [None, "static"])
def test_what_torch_compile_returns_generates_with_the_plain_model(
    cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile(llama(), backend="attn_compiler", options=OPTIONS)
    eager = _generate(llama())
    _same(_generate(compiled, cache_implementation=cache), eager)
    assert len(attn_compiler.reports()) == 0


def test_a_forward_that_is_replaced_by_a_compiled_one() -> None:
    model = llama()
    model.generation_config.cache_implementation = "static"
    eager = _generate(model)
    model.forward = torch.compile(model.forward, backend="attn_compiler", options=OPTIONS)
    _same(_generate(model), eager)
    # transformers makes the prompt's mask in code that is not compiled.
    assert found(sites=LAYERS) == ["9: not proved", *CASES["static"][2][1:]]


@pytest.mark.further
@pytest.mark.usefixtures("quick")
def test_prompts_of_many_lengths_have_masks_that_are_proved() -> None:
    """Both the mask's graphs and the model's serve all lengths after the first one. A prompt without padding needs no mask."""
    model = compile_model(_gemma(), options=OPTIONS)
    eager = _gemma()
    for length in (9, 12, 7, 15):
        ids = torch.randint(3, DECODER["vocab_size"], (2, length), generator=torch.Generator().manual_seed(length))
        padding = torch.ones_like(ids)
        padding[0, :3] = 0
        given = {"input_ids": ids, "cache_implementation": "static", "max_length": 24, "max_new_tokens": None}
        _same(_generate(model, **given, attention_mask=padding), _generate(eager, **given, attention_mask=padding))
    prompts_of = [site for report in attn_compiler.reports() for site in report.sites if site.spec.seqlen_q != 1]
    assert any(isinstance(site.spec.seqlen_q, str) for site in prompts_of)
    assert [site.spec.mask.reason for site in prompts_of] == [None] * len(prompts_of)
    assert all("causal" in site.spec.mask.words for site in prompts_of)
    ids = torch.randint(3, DECODER["vocab_size"], (2, 11))
    given = {"input_ids": ids, "cache_implementation": "static", "attention_mask": torch.ones_like(ids)}
    _same(_generate(model, **given), _generate(eager, **given))


@pytest.mark.usefixtures("quick")
def test_a_prompts_mask_of_numbers_is_known_too() -> None:
    """Attention that is spelled out has numbers added."""
    model = compile_model(_gemma2(), options=OPTIONS)
    _same(_generate(model, cache_implementation="static"), _generate(_gemma2(), cache_implementation="static"))
    masks = [site.spec.mask for site in _of_attention()[0].sites]
    assert [mask.reason for mask in masks] == [None, None]
    assert all("key padding" in mask.words for mask in masks)


@pytest.mark.further
@pytest.mark.usefixtures("quick")
def test_assisted_decoding() -> None:
    """The large model sees several tokens of the small one's at once. Without padding no step needs more than the diagonal."""
    model, assistant = llama(), llama(hidden_size=32, num_hidden_layers=1)
    inputs = {"input_ids": prompts()["input_ids"][1:]}
    eager = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    given = launching.run("Assisted decoding", model=model, assistant=assistant, inputs=inputs)
    assert torch.equal(given["tokens"], eager)
    reports = attn_compiler.reports()
    assert reports.num_misses == 0
    assert {report.num_sites for report in reports} == {1, LAYERS}
    words = {site.spec.mask.words for report in reports for site in report.sites}
    # Since transformers 5.24 a graph of a later call of the model has its first position as a number.
    assert {one for one in words if not one.startswith("causal from ")} == {
        "causal",
        "causal (bottom-right) (proved)",
        "none",
    }
