"""Compile a Hugging Face model for Trainer, accelerate, DDP and FSDP2, whose own switches only take backends that they know by name.

compile_model(model)                              # before Trainer(model=model, ...) or accelerator.prepare(model)
Trainer(..., callbacks=[CompileCallback()])       # the same when training begins
compile_model(model, per_layer=True)              # before or after fully_shard: each layer on its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_BACKEND = "attn_compiler"

#: PyTorch's attention, with masks whose meaning goes with them into layers that are compiled one by one
KNOWN_MASKS = "sdpa_of_known_masks"


def compile_model(
    model: nn.Module,
    *,
    per_layer: bool = False,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
) -> nn.Module:
    """Compile a model in place, and return it: its parameters, names and class stay what they are.

    per_layer: compile the layers that repeat, one by one. They share their code, and FSDP2 may gather their parameters outside of it.
        A model with PyTorch's attention then makes its masks in compiled code, so that what they mean is known to the layers.
        Calls make no cache unless they are asked to (`use_cache` of the config becomes False, as Trainer sets it): layers with caches share
        no code, and PyTorch compiles only eight of them.
    options, mode, dynamic: as torch.compile takes them. Raises ValueError if no layer repeats.
    """
    settings = {
        "backend": _BACKEND,
        "options": None if options is None else dict(options),
        "mode": mode,
        "dynamic": dynamic,
    }
    if not per_layer:
        model.compile(**settings)
        return model
    layers = list(_repeated(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no list of layers of one class; compile it as a whole: per_layer=False"
        )
    for layer in layers:
        layer.compile(**settings)
    _let_masks_be_known(model)
    _leave_out_caches(model)
    return model


class CompileCallback(TrainerCallback):
    """Compiles Trainer's model when training begins. settings: as compile_model takes them."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        compile_model(model, **self._settings)


def known_sdpa_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers' own mask, made in compiled code where one is needed."""
    if torch.compiler.is_compiling():
        found: torch.Tensor | None = sdpa_mask(*args, **kwargs)
        return found
    padding = kwargs.get("attention_mask")
    # transformers itself looks up in the numbers of the padding whether a mask can be left out. Where it can't, none is made twice.
    is_needed = padding is not None and kwargs.get("q_length") == kwargs.get("kv_length") and not bool(padding.all())
    if not is_needed and sdpa_mask(*args, **kwargs) is None:
        return None
    made: torch.Tensor = _compiled_mask(
        *args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )
    return made


_compiled_mask: Callable[..., Any] = torch.compile(sdpa_mask, backend=_BACKEND)


def _let_masks_be_known(model: nn.Module) -> None:
    """A model whose attention is not PyTorch's, or is not chosen by transformers, stays as it is."""
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None or getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return
    AttentionInterface.register(KNOWN_MASKS, sdpa_attention_forward)
    AttentionMaskInterface.register(KNOWN_MASKS, known_sdpa_mask)
    choose(KNOWN_MASKS)


def _leave_out_caches(model: nn.Module) -> None:
    """Each layer writes to a place of its own in a cache, so Dynamo would compile each anew."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of lists that hold several of one class, outermost lists only."""
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(layer) for layer in child}) == 1:
            yield from child
        else:
            yield from _repeated(child)
