"""Models with a batch row whose prompt is empty, and with padding on the left: logits at every position, and gradients, are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_compiler
from attn_compiler.lowerings.decode import schedule
from attn_compiler.lowerings.decode.schedule import ScheduleRow
from attn_compiler.passes.writing import keyless_nodes

LENGTH, TARGETS, WORDS = 12, 7, 99
_SMALL: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
_OF_BART: dict[str, Any] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2),
    "d_model": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    **dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0
    ),
}


def t5(kind: str) -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**_SMALL, **sizes, attn_implementation=kind))


def bart(kind: str) -> Any:
    config = transformers.BartConfig(**_SMALL, **_OF_BART, bos_token_id=1, attn_implementation=kind)
    return transformers.BartForConditionalGeneration(config)


def mbart(kind: str) -> Any:
    config = transformers.MBartConfig(**_SMALL, **_OF_BART, bos_token_id=1, attn_implementation=kind)
    return transformers.MBartForConditionalGeneration(config)


def marian(kind: str) -> Any:
    return transformers.MarianMTModel(transformers.MarianConfig(**_SMALL, **_OF_BART, attn_implementation=kind))


def pegasus(kind: str) -> Any:
    config = transformers.PegasusConfig(**_SMALL, **_OF_BART, attn_implementation=kind)
    return transformers.PegasusForConditionalGeneration(config)


def m2m(kind: str) -> Any:
    config = transformers.M2M100Config(**_SMALL, **_OF_BART, bos_token_id=1, attn_implementation=kind)
    return transformers.M2M100ForConditionalGeneration(config)


def whisper(kind: str) -> Any:
    """Its masks are the prompt's: of what it hears, it hides nothing."""
    sizes = {**_OF_BART, "max_source_positions": LENGTH, "max_target_positions": 32, "num_mel_bins": 8}
    config = transformers.WhisperConfig(**_SMALL, **sizes, bos_token_id=1, attn_implementation=kind)
    return transformers.WhisperForConditionalGeneration(config)


def speech_to_text(kind: str) -> Any:
    """Audio of no length in one row: cross attention without keys."""
    sizes = {**_OF_BART, "max_source_positions": 64, "max_target_positions": 32, "input_feat_per_channel": 8}
    config = transformers.Speech2TextConfig(
        **_SMALL, **sizes, bos_token_id=1, conv_channels=16, attn_implementation=kind
    )
    return transformers.Speech2TextForConditionalGeneration(config)


def llama(kind: str) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=WORDS, **sizes, num_key_value_heads=2, attn_implementation=kind)
    return transformers.LlamaForCausalLM(config)


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (3, LENGTH), generator=generator)
    real = torch.ones(3, LENGTH, dtype=torch.long)
    if model.config.model_type == "whisper":
        prompt = torch.ones(3, TARGETS, dtype=torch.long)
        prompt[1], prompt[2, :3] = 0, 0
        heard = torch.randn(3, model.config.num_mel_bins, 2 * LENGTH, generator=generator)
        return {"input_features": heard, "decoder_input_ids": ids[:, :TARGETS], "decoder_attention_mask": prompt}
    if model.config.model_type == "speech_to_text":
        heard = torch.randn(3, 4 * LENGTH, 8, generator=generator)
        frames = torch.ones(3, 4 * LENGTH, dtype=torch.long)
        frames[1], frames[2, 24:] = 0, 0
        return {"input_features": heard, "attention_mask": frames, "decoder_input_ids": ids[:, :TARGETS]}
    if not model.config.is_encoder_decoder:
        real[1, :5] = 0
        return {"input_ids": ids, "attention_mask": real}
    real[1], real[2, 6:] = 0, 0
    targets = torch.randint(3, WORDS, (3, TARGETS), generator=generator)
    return {"input_ids": ids, "attention_mask": real, "decoder_input_ids": targets}


def _found(model: Any, run: Callable[..., Any]) -> list[torch.Tensor]:
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in _inputs(model).items()}
    logits = run(**inputs, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape).to(logits.dtype)).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.in_turns(5)
@pytest.mark.parametrize(
    ("build", "kind"),
    # Llama's eager attention gives padding on the left no number in float64; Speech2Text has no other.
    [
        *((build, kind) for build in (t5, bart, m2m, whisper) for kind in ("eager", "sdpa")),
        *((llama, "sdpa"), (speech_to_text, "eager")),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_every_position_is_eagers(build: Callable[[str], Any], kind: str) -> None:
    torch.manual_seed(0)
    model = build(kind).train()
    run = torch.compile(model, backend="attn_compiler", options={"inner": "aot_eager", "strict": True})
    found = _found(model, run)
    # SDPA's kernel for CPUs has no gradient in rows that the lowest number masks.
    with sdpa_kernel(SDPBackend.MATH):
        eager, exact = _found(model, model), _found(wide := copy.deepcopy(model).double(), wide)
    assert sum(report.num_sites for report in attn_compiler.reports()) > 0
    for ours, own, true in zip(found, eager, exact, strict=True):
        size = max(1.0, float(true.abs().max()))
        assert float((ours.double() - true).abs().max()) <= 2 * float((own.double() - true).abs().max()) + 1e-5 * size


NEW_TOKENS = 4
#: short caches have several splits
_SPLIT = ScheduleRow(bytes=4, head_dim=64, rows=64, keys=16, warps=4, stages=1, programs=64, least_keys=16)


def _generated(model: Any, cache: str, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the logits that they were chosen by."""
    inputs = _inputs(model)
    if model.config.model_type != "whisper":
        del inputs["decoder_input_ids"]
    # Whisper's own way to generate has no masks of prompts.
    result = transformers.GenerationMixin.generate(
        model,
        **inputs,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    return result.sequences, torch.stack(result.logits)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("cache", ["static", None])
@pytest.mark.parametrize(
    ("build", "kind"),
    [
        *((build, "eager") for build in (t5, bart, mbart, marian, pegasus, m2m, whisper, speech_to_text)),
        *((build, "sdpa") for build in (t5, whisper)),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_batch_with_an_empty_prompt_generates_as_eager_does(
    build: Callable[[str], Any], kind: str, cache: str | None
) -> None:
    """The kernel for decoding, in Triton's interpreter without a GPU."""
    torch.manual_seed(0)
    model = build(kind).eval()
    tokens, logits = _generated(model, cache, disable_compile=True)
    attn_compiler.reset()
    options = {"inner": "eager", "strict": True, "lowerings": ("decode", "triton")}
    model.forward = torch.compile(model.forward, backend="attn_compiler", options=options)
    with mock.patch.object(schedule, "ROWS", (_SPLIT,)):
        found, found_logits = _generated(model, cache, disable_compile=True)
    torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4 * logits.abs().max().item())
    assert torch.equal(found, tokens)
    sites = [site for report in attn_compiler.reports() for site in report.sites]
    assert {site.decision.lowering for site in sites if site.spec.seqlen_q == 1} == {"decode"}
    # SDPA's truth values leave such a row to PyTorch.
    if (build, kind) != (whisper, "sdpa"):
        assert any(keyless_nodes.NOTE in site.notes for site in sites)
