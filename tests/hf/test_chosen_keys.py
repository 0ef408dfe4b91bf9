"""Models whose indexer chooses keys for each query (DeepSeek V3.2, GLM-5): what else masks is kept, and numbers are eager's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attn_compiler
from attn_compiler.reporting.facts import SiteReport
from attn_compiler.spec.masks import MaskSpec
from tests.hf.family import SEED
from tests.hf.latents import LATENTS, VOCAB, decoded
from tests.hf.packages import Unavailable, import_package
from tests.interpreted_target import triton_interpreted

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
LENGTH, CHOSEN, PADDED = 23, 4, 5


@pytest.fixture(autouse=True)
def _from_the_start() -> Iterator[None]:
    torch._dynamo.reset()
    attn_compiler.reset()
    yield
    torch._dynamo.reset()


def _model(family: str, attention: str) -> Any:
    made = LATENTS[family]
    try:
        _, model = type(made)(
            config=made.config, model=made.model, settings={**made.settings, "index_topk": CHOSEN}, impl=attention
        ).build()
    except Unavailable as missing:
        pytest.skip(str(missing))
    return model


def _inputs() -> dict[str, torch.Tensor]:
    """A batch that is padded on the left: queries there have no key."""
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :PADDED] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _sites() -> list[SiteReport]:
    return [site for report in attn_compiler.reports() for site in report.sites]


def _assert_in_part(mask: MaskSpec) -> None:
    assert [type(kind).__name__ for kind in mask.held] == ["Causal", "KeyPadding"], mask.words
    assert mask.reason is not None
    assert "scatter" in mask.reason
    assert mask.rest is not None
    assert mask.rest.formula.startswith("¬scatter")


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_prompt(family: str, attention: str) -> None:
    model, inputs = _model(family, attention), _inputs()
    options = {"inner": "eager", "strict": True, "lowerings": ["math"], "cache_rewrites": False}
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).last_hidden_state
        step = torch.compile(model, backend="attn_compiler", options=options)
        found = step(**inputs, use_cache=False).last_hidden_state
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[kept], expected[kept], rtol=0, atol=1e-4 * expected.abs().max().item())
    assert _sites()
    for site in _sites():
        assert site.decision.lowering == "math"
        _assert_in_part(site.spec.mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_training(family: str) -> None:
    """All of the parameters' gradients, with a loss over real tokens."""
    inputs, found = _inputs(), {}
    kept = inputs["attention_mask"].bool()
    for name in ("eager", "ours"):
        model = _model(family, "sdpa").train()
        options = {"inner": "eager", "strict": True, "lowerings": ["math"], "cache_rewrites": False}
        step = model if name == "eager" else torch.compile(model, backend="attn_compiler", options=options)
        step(**inputs, use_cache=False).last_hidden_state[kept].square().sum().backward()
        found[name] = {of: p.grad for of, p in model.named_parameters() if p.grad is not None}
    assert found["ours"].keys() == found["eager"].keys()
    for of, expected in found["eager"].items():
        torch.testing.assert_close(found["ours"][of], expected, rtol=0, atol=2e-4 * float(expected.abs().max()) + 1e-6)
    for site in _sites():
        _assert_in_part(site.spec.mask)


@pytest.mark.in_turns(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter, on a CPU")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("static", [True, False])
def test_a_step_reads_the_chosen_slots_of_a_cache(family: str, static: bool) -> None:
    """The latent of these alone, and the tokens and scores of eager decoding. A cache that grows has its second step's graph for all."""
    model, steps = _model(family, "sdpa"), 3 if static else 5
    config = model.config
    expected = decoded(model, model, config, static=static, steps=steps)
    options = {"inner": "eager", "strict": True, "lowering": "decode_latent", "cache_rewrites": False}
    with triton_interpreted():
        step = torch.compile(model, backend="attn_compiler", dynamic=False if static else None, options=options)
        found = decoded(model, step, config, static=static, steps=steps)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4 * expected.scores.abs().max().item())
    assert _sites()
    for site in _sites():
        assert site.decision.lowering == "decode_latent"
        if not static and isinstance(site.spec.seqlen_kv, int):
            continue
        assert any(note.startswith(f"the {CHOSEN} keys of ") for note in site.notes), site.notes


def _minimax() -> tuple[Any, Any]:
    try:
        configs = importlib.import_module("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
        models = importlib.import_module("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    config = configs.MiniMaxM3VLTextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rotary_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        dense_intermediate_size=64,
        shared_intermediate_size=64,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=32,
        index_block_size=8,
        index_topk_blocks=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(SEED)
    return config, models.MiniMaxM3VLTextModel._from_config(config, attn_implementation="sdpa").eval()


def _minimax_steps(config: Any, model: Any, step: Any) -> torch.Tensor:
    """What three tokens after a padded prompt get, over a static cache of twelve blocks."""
    ids = torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0
    cache, found = import_package("transformers").StaticCache(config=config, max_cache_len=160), []
    with torch.no_grad():
        for number in range(4):
            run = step if number else model
            out = run(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            found.append(out.last_hidden_state[:, -1])
            ids, mask = torch.full((2, 1), 5 + number), torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    return torch.stack(found)


@pytest.mark.further
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter, on a CPU")
def test_blocks_of_keys_by_groups_of_heads() -> None:
    """MiniMax M3: of 160 slots, two blocks of 8."""
    config, model = _minimax()
    expected = _minimax_steps(config, model, model)
    options = {"inner": "eager", "strict": True, "lowering": "decode", "cache_rewrites": False}
    with triton_interpreted():
        step = torch.compile(model, backend="attn_compiler", dynamic=False, options=options)
        found = _minimax_steps(config, model, step)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    gathering = [site for site in _sites() if site.modules == ("layers.1.self_attn",)]
    assert gathering
    for site in gathering:
        assert any(note.startswith("the 16 keys of ") for note in site.notes), site.notes
