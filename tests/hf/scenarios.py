"""The ways in which each family is run: what is fed, in which mode, and what of the output has to agree.

A scenario is one entry of SCENARIOS. `prepare` turns a family's model into a `Trial`, which the survey runs three times: eager
and counted, compiled, and (for half precision) in float32 as the numeric reference.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.hf.family import Family, Kwargs, Size, set_dropout
from tests.hf.packages import import_package

Forward = Callable[..., Any]

PREFILL, CACHE = 9, 24


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """training: with dropout layers active and a backward. dynamic: compiled with dynamic=True and called at two sizes.

    dtypes: what it is run in; "amp" is float32 under bfloat16 autocast. padded: some tokens are padding, where the model has a
    mask. calls: forwards in one run, each with the family's number of sites. compares: False where two runs differ by design.
    families: those that are run, all if empty.
    """

    name: str
    training: bool = False
    dynamic: bool = False
    padded: bool = False
    dtypes: tuple[str, ...] = ("fp32",)
    calls: int = 1
    compares: bool = True
    dropout: float = 0.0
    families: frozenset[str] = frozenset()

    def why_not(self, family: Family) -> str | None:
        """Why `family` is not run in this scenario, or None."""
        if self.families and family.name not in self.families:
            return f"one wrapper serves every model: {', '.join(sorted(self.families))} stand for the others"
        return None


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="no_mask", dtypes=("fp32", "bf16")),
    Scenario(name="padded", padded=True, dtypes=("fp32", "bf16")),
    Scenario(name="no_cache"),
    Scenario(name="static_decode", dtypes=("fp32", "bf16"), calls=2),
    Scenario(name="training", training=True, dtypes=("fp32", "bf16", "amp")),
    Scenario(name="dynamic", dynamic=True, calls=2),
    Scenario(name="output_attentions"),
    Scenario(name="checkpoint", training=True, padded=True),
    Scenario(name="dropout", training=True, compares=False, dropout=0.1),
    Scenario(name="ddp", training=True, families=frozenset({"llama", "gpt2", "bert", "t5"})),
)
SCENARIO: Mapping[str, Scenario] = {scenario.name: scenario for scenario in SCENARIOS}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One family in one scenario, ready to run.

    model: what is compiled. forward(model, fn): every call of the scenario through `fn` (the model itself, or its compiled
    form), with fresh state; returns what the calls gave. valid: bool[B, S] of real tokens, or None if all are.
    """

    scenario: Scenario
    model: nn.Module
    forward: Callable[[nn.Module, Forward], list[Any]]
    autocast: bool
    valid: torch.Tensor | None = None

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Gradient and autocast modes of a forward."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.scenario.training))
        if self.autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        return stack


@contextlib.contextmanager
def distributed(trial: Trial) -> Iterator[nn.Module]:
    """What is compiled: the model, in scenario "ddp" wrapped by DistributedDataParallel over a process group of one."""
    if trial.scenario.name != "ddp":
        yield trial.model
        return
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            yield nn.parallel.DistributedDataParallel(trial.model)
        finally:
            torch.distributed.destroy_process_group()


def prepare(family: Family, scenario: Scenario, impl: str, dtype: str) -> Trial:
    """Build the model and its inputs. Raises Unavailable where a package is missing."""
    model = family.build(impl).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    model.train(scenario.training)
    set_dropout(model, scenario.dropout)
    if scenario.name == "checkpoint":
        _enable_checkpointing(model)
    valid = _valid_tokens(family, scenario) if scenario.padded and family.mask else None
    forward = _static_decode(family) if scenario.name == "static_decode" else _plain(family, scenario, valid)
    return Trial(scenario=scenario, model=model, forward=forward, autocast=dtype == "amp", valid=valid)


def _plain(family: Family, scenario: Scenario, valid: torch.Tensor | None) -> Callable[[nn.Module, Forward], list[Any]]:
    sizes = (Size(), Size(batch=3, seqlen=17)) if scenario.dynamic else (Size(),)
    extra: Kwargs = {}
    if scenario.name in ("no_cache", "checkpoint") and "no_cache" not in family.absent:
        extra["use_cache"] = False
    if scenario.name == "output_attentions":
        extra["output_attentions"] = True
    if valid is not None:
        extra[family.mask] = ~valid if family.mask_true_is_padding else valid.long()

    def forward(model: nn.Module, fn: Forward) -> list[Any]:
        return [fn(**_cast(family.inputs(size), model), **extra) for size in sizes]

    return forward


def _static_decode(family: Family) -> Callable[[nn.Module, Forward], list[Any]]:
    """Two decode steps after an eager prefill; the caches are part of the output, so that their in-place updates are compared."""

    def forward(model: nn.Module, fn: Forward) -> list[Any]:
        inputs = _cast(family.inputs(Size()), model)
        cache, step = (_seq2seq_prefill if family.kind == "encoder_decoder" else _decoder_prefill)(model, inputs)
        results: list[Any] = [fn(**step(index)) for index in range(2)]
        return [*results, cache]

    return forward


def _decoder_prefill(model: nn.Module, inputs: Kwargs) -> tuple[Any, Callable[[int], Kwargs]]:
    cache = import_package("transformers").StaticCache(config=model.config, max_cache_len=CACHE)
    ids = inputs["input_ids"]
    model(input_ids=ids[:, :PREFILL], past_key_values=cache, use_cache=True)
    return cache, lambda index: {
        "input_ids": ids[:, PREFILL + index : PREFILL + index + 1],
        "past_key_values": cache,
        "use_cache": True,
    }


def _seq2seq_prefill(model: Any, inputs: Kwargs) -> tuple[Any, Callable[[int], Kwargs]]:
    transformers = import_package("transformers")
    ids = inputs.pop("decoder_input_ids")
    states = model.get_encoder()(**inputs)
    length = states.last_hidden_state.shape[1]
    cache = transformers.EncoderDecoderCache(
        transformers.StaticCache(config=model.config, max_cache_len=CACHE),
        transformers.StaticCache(config=model.config, max_cache_len=length),
    )
    prefill = 5
    model(encoder_outputs=states, decoder_input_ids=ids[:, :prefill], past_key_values=cache, use_cache=True)
    return cache, lambda index: {
        "encoder_outputs": states,
        "decoder_input_ids": ids[:, prefill + index : prefill + index + 1],
        "past_key_values": cache,
        "use_cache": True,
    }


def _valid_tokens(family: Family, scenario: Scenario) -> torch.Tensor:
    """bool[B, S], True for a real token. What a causal mask reads is padded on the left at inference, everything else on the right.

    Left padding leaves rows without any allowed key: their outputs have no meaning, but must not spread. (Padding on the right
    of a causal attention is hidden from real tokens by the causality alone, so it would test nothing.)
    """
    inputs = family.inputs(Size())
    name = {"decoder_attention_mask": "decoder_input_ids", "memory_key_padding_mask": "memory"}.get(family.mask)
    tokens = inputs[name or ("key" if "key" in inputs else next(iter(inputs)))]
    valid = torch.ones(tokens.shape[:2], dtype=torch.bool)
    causal = family.kind == "decoder" or family.mask == "decoder_attention_mask"
    if causal and not scenario.training:
        valid[0, :4] = False
    else:
        valid[0, -4:] = False
    return valid


def _cast(inputs: Kwargs, model: nn.Module) -> Kwargs:
    dtype = next(model.parameters()).dtype
    return {name: v.to(dtype) if v.is_floating_point() else v for name, v in inputs.items()}


def _enable_checkpointing(model: Any) -> None:
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    elif hasattr(model, "gradient_checkpointing_enable"):  # the older name of the same
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        model.set_grad_checkpointing(True)
