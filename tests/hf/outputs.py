"""What a model gave, as named tensors: its outputs, the caches it wrote and, after a backward, every parameter's gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tests.hf.scenarios import Forward, Trial

Named = dict[str, torch.Tensor]
CACHE_PATH = "past_key_values"


def run(trial: Trial, model: nn.Module, fn: Forward) -> Named:
    """One run of `trial` on `model` through `fn`: outputs detached, and gradients when the scenario trains."""
    model.zero_grad(set_to_none=True)
    with trial.context():
        results = trial.forward(model, fn)
    named = dict(_kept(trial, results))
    if trial.scenario.training:
        _loss(named).backward()  # type: ignore[no-untyped-call]
        named |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def _loss(named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A float32 scalar that weighs every differentiable output element differently, so that no gradient cancels."""
    terms = []
    for tensor in named.values():
        if tensor.requires_grad:
            flat = tensor.float().flatten()
            terms.append((flat * torch.arange(flat.numel()).mul(0.7).cos()).mean())
    return torch.stack(terms).sum()


def _kept(trial: Trial, results: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating-point tensors of `results` that have to agree.

    Caches are compared when nothing is padded: later layers write rows of padding tokens, which mean nothing, into them.
    A training loss doesn't read them.
    """
    for call, result in enumerate(results):
        for path, tensor in flatten(result):
            if not tensor.is_floating_point():
                continue
            if CACHE_PATH in path and (trial.valid is not None or trial.scenario.training):
                continue
            yield f"{call}:{'.'.join(path)}", tensor if trial.valid is None else _real_rows(tensor, trial.valid)


def _real_rows(tensor: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Rows of real tokens, where the tensor has the mask's tokens as its rows; all of it otherwise."""
    return tensor[valid] if tensor.shape[:2] == valid.shape else tensor


def flatten(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Every tensor of nested tuples, dicts, model outputs and key/value caches, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from flatten(item, (*path, str(name)))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from flatten(item, (*path, str(index)))
    elif hasattr(value, "self_attention_cache"):
        yield from flatten((value.self_attention_cache, value.cross_attention_cache), (*path, CACHE_PATH))
    elif hasattr(value, "layers"):
        for index, layer in enumerate(value.layers):
            yield from flatten({"keys": layer.keys, "values": layer.values}, (*path, CACHE_PATH, str(index)))
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"output {'.'.join(path)} is a {type(value).__name__}: tell tests/hf/outputs.py how to read it")


#: of `generated`
NEW_TOKENS = 4


def generated(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the logits that they were chosen by."""
    result = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        cache_implementation="static",
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    return result.sequences, torch.stack(result.logits)
