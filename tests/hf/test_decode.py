"""Greedy generation by the decode kernel, token for token as eager generation: `model.generate` with a static cache, and own loops.

The kernel runs in Triton's interpreter without a GPU, with so few keys a split that these short caches have several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import attn_compiler
from attn_compiler.lowerings.decode import schedule
from attn_compiler.lowerings.decode.schedule import ScheduleRow
from attn_compiler.reporting.report import Report
from tests.hf.family import Size
from tests.hf.outputs import generated
from tests.hf.packages import Unavailable, import_package
from tests.hf.survey import FAMILY

OPTIONS = {"inner": "eager", "strict": True, "lowerings": ("decode", "triton")}


@pytest.fixture(autouse=True)
def _few_keys_a_split() -> Iterator[None]:
    row = ScheduleRow(bytes=4, head_dim=256, rows=64, keys=16, warps=4, stages=1, programs=64, least_keys=16)
    with mock.patch.object(schedule, "ROWS", (row,)):
        yield


def _model(family: str, impl: str) -> Any:
    try:
        return FAMILY[family].build(impl).eval()
    except Unavailable as missing:
        pytest.skip(str(missing))


def _inputs(family: str) -> dict[str, torch.Tensor]:
    inputs = FAMILY[family].inputs(Size())
    if "input_features" in inputs:
        return {"input_features": inputs["input_features"], "decoder_input_ids": inputs["decoder_input_ids"][:, :4]}
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    return {"input_ids": inputs["input_ids"], "attention_mask": mask}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    ("family", "impl"),
    [
        ("llama", "sdpa"),
        ("gemma2", "eager"),
        ("mistral", "sdpa"),
        ("gpt_oss", "eager"),
        ("deepseek_v3", "sdpa"),
        ("whisper", "sdpa"),
        *(pytest.param(family, "sdpa", marks=pytest.mark.slow) for family in ("qwen3", "gemma3", "gpt2")),
    ],
)
def test_generate_with_a_static_cache(family: str, impl: str) -> None:
    model, inputs = _model(family, impl), _inputs(family)
    reports: list[Report] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        compile_fx: Any = torch._dynamo.lookup_backend("attn_compiler")
        compiled = compile_fx(gm, example_inputs, options=OPTIONS)
        reports.append(attn_compiler.reports()[-1])
        return compiled

    config = import_package("transformers").CompileConfig(backend=backend, mode=None, fullgraph=False, dynamic=False)
    # transformers compiles by itself on accelerators only.
    config._compile_all_devices = True
    tokens, logits = generated(model, inputs, disable_compile=True)
    found, found_logits = generated(model, inputs, compile_config=config)
    assert torch.equal(found, tokens)
    torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4 * logits.abs().max().item())
    sites = [site for report in reports for site in report.sites]
    assert {site.decision.lowering for site in sites} == {"decode"}
    assert all(site.copies == () for site in sites)


LONGEST = 40
#: tokens of each call: a prompt, single tokens, several at once, a single token again
STEPS = (9, 1, 1, 4, 1)


def _own_loop(run: Any, model: Any, ids: torch.Tensor, padding: torch.Tensor) -> list[torch.Tensor]:
    """The last position's logits of each call."""
    cache = import_package("transformers").StaticCache(config=model.config, max_cache_len=LONGEST)
    found, end = [], 0
    for tokens in STEPS:
        first, end = end, end + tokens
        given = {"input_ids": ids[:, first:end], "attention_mask": padding[:, :end], "past_key_values": cache}
        found.append(run(**given, use_cache=True).logits[:, -1])
    return found


@pytest.mark.further
def test_a_loop_of_ones_own() -> None:
    model = _model("llama", "sdpa")
    ids = FAMILY["llama"].inputs(Size(seqlen=sum(STEPS)))["input_ids"]
    padding = torch.ones(2, sum(STEPS), dtype=torch.long)
    padding[0, :5] = 0
    attn_compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="attn_compiler", options=OPTIONS)
        found, expected = (_own_loop(run, model, ids, padding) for run in (compiled, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    # Several tokens at once come with a symbolic length, which the other Triton kernels take.
    for site in sites:
        assert site.decision.lowering == ("decode" if isinstance(site.spec.seqlen_q, int) else "triton")
    assert all(site.copies == () for site in sites)


def test_a_growing_cache_is_compiled_once_for_all_lengths() -> None:
    model = _model("llama", "sdpa")
    ids = FAMILY["llama"].inputs(Size(seqlen=12))["input_ids"]
    attn_compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="attn_compiler", dynamic=True, options=OPTIONS)
        cache = import_package("transformers").DynamicCache()
        model(input_ids=ids[:, :4], past_key_values=cache)
        logits = [compiled(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(4, 9)]
        expected = model(input_ids=ids).logits
        graphs = len(attn_compiler.reports())
        logits += [compiled(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(9, 12)]
    torch.testing.assert_close(torch.cat(logits, 1), expected[:, 4:], rtol=1e-4, atol=1e-5)
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    assert {site.decision.lowering for site in sites} == {"decode"}
    assert len(attn_compiler.reports()) == graphs


def test_a_cache_in_fp8_is_read_as_it_is() -> None:
    transformers: Any = import_package("transformers")
    if not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this version of transformers has no cache in FP8")
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}
    config = transformers.LlamaConfig(num_hidden_layers=2, intermediate_size=96, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 99, (2, 12))

    def loop(run: Any) -> torch.Tensor:
        cache = transformers.QuantizedCache(backend="fp8", config=config)
        model(input_ids=ids[:, :5], past_key_values=cache)
        steps = [run(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(5, 12)]
        return torch.cat(steps, 1)

    attn_compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="attn_compiler", dynamic=True, options=OPTIONS)
        torch.testing.assert_close(loop(compiled), loop(model), rtol=1e-4, atol=1e-5)
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    assert {site.decision.lowering for site in sites} == {"decode"}
    assert all(site.spec.stored is not None and site.spec.stored.k_scaled for site in sites)


def test_a_prompt_is_read_up_to_its_own_end() -> None:
    """A prefill's kernel visits no tile of the cache beyond the prompt: what is there, a tile further, may be anything."""
    model, longest = _model("llama", "sdpa"), 256
    ids = FAMILY["llama"].inputs(Size(seqlen=20))["input_ids"]
    cache = import_package("transformers").StaticCache(config=model.config, max_cache_len=longest)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model(input_ids=ids[:, :1], past_key_values=cache)
        for layer in cache.layers:
            layer.cumulative_length.zero_()
            layer.keys[:, :, 128:], layer.values[:, :, 128:] = torch.nan, torch.nan
        options = {**OPTIONS, "lowerings": ("triton",)}
        compiled = torch.compile(model, backend="attn_compiler", dynamic=True, options=options)
        found = [compiled(input_ids=x, past_key_values=cache).logits for x in (ids[:, :12], ids[:, 12:])]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)
