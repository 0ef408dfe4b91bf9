"""Compile a Hugging Face model for Trainer, accelerate, DDP and FSDP2, whose own switches only take backends that they know by name.

compile_model(model)                              # before Trainer(model=model, ...) or accelerator.prepare(model)
Trainer(..., callbacks=[CompileCallback()])       # the same when training begins
compile_model(model, per_layer=True)              # before or after fully_shard: each layer on its own
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, TrainerCallback
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate, eager_mask, flex_attention_mask, sdpa_mask

from attn_compiler.torch_private import frames as torch_frames

_BACKEND = "attn_compiler"

#: PyTorch's attention, with masks whose kinds stay known in layers that are compiled one by one
KNOWN_MASKS = "sdpa_of_known_masks"
#: eager attention, with additive masks whose kinds stay known
_KNOWN_NUMBERS = "eager_of_known_masks"
#: attention of transformers -> the same with known masks
_KNOWN = {"sdpa": KNOWN_MASKS, "eager": _KNOWN_NUMBERS}
#: FlexAttention, with block masks made in the graph that uses them
KNOWN_BLOCKS = "flex_attention_of_known_blocks"


def compile_model(
    model: nn.Module,
    *,
    per_layer: bool = False,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
) -> nn.Module:
    """Compile a model in place, and return it: its parameters, names and class stay the same.

    per_layer: compile the layers that repeat, one by one. They share their code, and FSDP2 may gather their parameters outside of it.
        A model with PyTorch's attention then makes its masks in compiled code, so that the layers know their kinds.
        Calls make no cache unless asked to (`use_cache` of the config becomes False, as Trainer sets it): layers with caches share
        no code, and PyTorch compiles only eight of them.
    A whole model with FlexAttention makes its block masks in its own graph, so that they are known, too. The mask of a prompt that
        `generate` makes for a static cache is made in compiled code.
    options, mode, dynamic: as torch.compile takes them. Raises ValueError if no layer repeats.
    """
    settings = {
        "backend": _BACKEND,
        "options": None if options is None else dict(options),
        "mode": mode,
        "dynamic": dynamic,
    }
    if not per_layer:
        _choose(model, KNOWN_BLOCKS, instead_of="flex_attention", attend=flex_attention_forward, mask=known_block_mask)
        _let_prompts_masks_be_known(model)
        model.compile(**settings)
        _let_layers_share(model)
        return model
    layers = list(_repeated(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no list of layers of one class; compile it as a whole: per_layer=False"
        )
    for layer in layers:
        layer.compile(**settings)
    _choose(model, KNOWN_MASKS, instead_of="sdpa", attend=sdpa_attention_forward, mask=known_sdpa_mask)
    _leave_out_caches(model)
    return model


class CompileCallback(TrainerCallback):
    """Compile Trainer's model when training begins. settings: as compile_model takes them."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        compile_model(model, **self._settings)


def known_sdpa_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return transformers' own mask, made in compiled code if one is needed."""
    if torch.compiler.is_compiling():
        found: torch.Tensor | None = sdpa_mask(*args, **kwargs)
        return found
    padding = kwargs.get("attention_mask")
    # transformers checks the padding's values to leave out a needless mask. Avoid making a needed one twice.
    is_needed = padding is not None and kwargs.get("q_length") == kwargs.get("kv_length") and not bool(padding.all())
    if not is_needed and sdpa_mask(*args, **kwargs) is None:
        return None
    return _compiled(_sdpa_masks, args, {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def known_eager_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return transformers' own additive mask, made in compiled code."""
    if torch.compiler.is_compiling():
        found: torch.Tensor = eager_mask(*args, **kwargs)
        return found
    return _compiled(_eager_masks, args, kwargs)


def _compiled(
    masks: tuple[Callable[..., Any], Callable[..., Any]], args: tuple[Any, ...], given: dict[str, Any]
) -> torch.Tensor:
    """Make a mask by compiled code, in which equal numbers of queries and keys are one number, or one symbol once lengths change."""
    of_any, of_squares = masks
    if args or given.get("q_length") != given.get("kv_length"):
        found: torch.Tensor = of_any(*args, **given)
        return found
    length = given["q_length"]
    on_square: torch.Tensor = of_squares(
        length, **{k: x for k, x in given.items() if k not in ("q_length", "kv_length")}
    )
    return on_square


def _square_sdpa_mask(length: int, **given: Any) -> Any:
    return sdpa_mask(q_length=length, kv_length=length, **given)


def _square_eager_mask(length: int, **given: Any) -> Any:
    return eager_mask(q_length=length, kv_length=length, **given)


_sdpa_masks = (torch.compile(sdpa_mask, backend=_BACKEND), torch.compile(_square_sdpa_mask, backend=_BACKEND))
_eager_masks = (torch.compile(eager_mask, backend=_BACKEND), torch.compile(_square_eager_mask, backend=_BACKEND))


def _create_block_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> flex_attention.BlockMask:
    """Create PyTorch's block mask without its `_compile`: that warns, and breaks the graph. A graph compiles the function anyway."""
    return flex_attention.create_block_mask(*args, **kwargs)


def _are_all(_: torch.Tensor) -> bool:
    """Return False: asking a tensor's values breaks the graph, and transformers uses it only to leave out padding that masks nothing."""
    return False


# transformers' own code, but for the two calls that break the graph.
_block_mask_in_graph: Callable[..., Any] = types.FunctionType(
    flex_attention_mask.__code__,
    {**flex_attention_mask.__globals__, "create_block_mask": _create_block_mask, "fast_all": _are_all},
    flex_attention_mask.__name__,
    flex_attention_mask.__defaults__,
)


def known_block_mask(*args: Any, **kwargs: Any) -> flex_attention.BlockMask:
    """Return transformers' own block mask; in compiled code, without a graph break."""
    make = _block_mask_in_graph if torch.compiler.is_compiling() else flex_attention_mask
    made: flex_attention.BlockMask = make(*args, **kwargs)
    return made


def _let_prompts_masks_be_known(model: nn.Module) -> None:
    """Wrap the mask function of `generate`, which with a static cache makes a prompt's mask before it calls the model."""
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    if isinstance(model, GenerationMixin) and not isinstance(create, functools.partial):
        AttentionMaskInterface.register(KNOWN_MASKS, known_sdpa_mask)
        AttentionMaskInterface.register(_KNOWN_NUMBERS, known_eager_mask)
        model.create_masks_for_generate = functools.partial(_masks_for_generate, create)  # type: ignore[assignment]


def _masks_for_generate(create: Callable[..., Any], *, config: Any, **given: Any) -> Any:
    """Call `create`, for several queries with functions of known masks. A single step's mask already marks each used key."""
    # Transformers 4 names it differently.
    embeds = given.get("inputs_embeds", given.get("input_embeds"))
    if embeds is not None and embeds.shape[1] > 1:
        config = copy.deepcopy(config)
        for part in {id(x): x for x in (config, config.get_text_config())}.values():
            part._attn_implementation = _KNOWN.get(part._attn_implementation, part._attn_implementation)
    return create(config=config, **given)


def _choose(
    model: nn.Module, name: str, *, instead_of: str, attend: Callable[..., Any], mask: Callable[..., Any]
) -> None:
    """Switch a model's attention, unless it has another one or transformers does not choose it."""
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None or getattr(getattr(model, "config", None), "_attn_implementation", None) != instead_of:
        return
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    choose(name)


def _let_layers_share(model: nn.Module) -> None:
    """Tell Dynamo, while it traces, that the backward need not store again what layers store outside of their checkpoints.

    Gemma 4 and Gemma 3n store keys and values for later layers so. The graph hands them on.
    """
    call = model._compiled_call_impl
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if call is not None and getattr(text, "num_kv_shared_layers", None):
        model._compiled_call_impl = torch_frames.storing_once(call)


def _leave_out_caches(model: nn.Module) -> None:
    """Switch caches off: each layer writes to its own slot of a cache, so Dynamo would compile each layer anew."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of lists that hold several of one class, outermost lists only."""
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(layer) for layer in child}) == 1:
            yield from child
        else:
            yield from _repeated(child)
