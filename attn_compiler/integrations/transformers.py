"""Compile a Hugging Face model for Trainer, accelerate, DDP and FSDP2, whose own switches only take backends that they know by name.

compile_model(model)                              # before Trainer(model=model, ...) or accelerator.prepare(model)
Trainer(..., callbacks=[CompileCallback()])       # the same when training begins
compile_model(model, per_layer=True)              # before or after fully_shard: each layer on its own
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, TrainerCallback
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flex_attention_mask, sdpa_mask

_BACKEND = "attn_compiler"

#: PyTorch's attention, with masks whose meaning goes with them into layers that are compiled one by one
KNOWN_MASKS = "sdpa_of_known_masks"
#: FlexAttention, with block masks that are made in the graph that uses them
KNOWN_BLOCKS = "flex_attention_of_known_blocks"


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
    A whole model with FlexAttention makes its block masks in its own graph, so that they are known, too.
    options, mode, dynamic: as torch.compile takes them. Raises ValueError if no layer repeats.
    """
    settings = {
        "backend": _BACKEND,
        "options": None if options is None else dict(options),
        "mode": mode,
        "dynamic": dynamic,
    }
    if not per_layer:
        _let_blocks_be_known(model)
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


def _create_block_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> flex_attention.BlockMask:
    """PyTorch's own, which warns where it is asked to compile itself. Dynamo breaks a graph there; in a graph, it is compiled anyway."""
    return flex_attention.create_block_mask(*args, **kwargs)


def _are_all(_: torch.Tensor) -> bool:
    """What a tensor holds is not known in a graph. To ask breaks it; transformers only leaves out padding that is none."""
    return False


# transformers' own lines, but for the two that break the graph.
_block_mask_in_graph: Callable[..., Any] = types.FunctionType(
    flex_attention_mask.__code__,
    {**flex_attention_mask.__globals__, "create_block_mask": _create_block_mask, "fast_all": _are_all},
    flex_attention_mask.__name__,
    flex_attention_mask.__defaults__,
)


def known_block_mask(*args: Any, **kwargs: Any) -> flex_attention.BlockMask:
    """transformers' own block mask; in compiled code, without a break of the graph."""
    make = _block_mask_in_graph if torch.compiler.is_compiling() else flex_attention_mask
    made: flex_attention.BlockMask = make(*args, **kwargs)
    return made


def _let_masks_be_known(model: nn.Module) -> None:
    _choose(model, KNOWN_MASKS, instead_of="sdpa", attend=sdpa_attention_forward, mask=known_sdpa_mask)


def _let_blocks_be_known(model: nn.Module) -> None:
    _choose(model, KNOWN_BLOCKS, instead_of="flex_attention", attend=flex_attention_forward, mask=known_block_mask)


def _choose(
    model: nn.Module, name: str, *, instead_of: str, attend: Callable[..., Any], mask: Callable[..., Any]
) -> None:
    """A model with another attention, or whose attention is not chosen by transformers, stays as it is."""
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None or getattr(getattr(model, "config", None), "_attn_implementation", None) != instead_of:
        return
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    choose(name)


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
