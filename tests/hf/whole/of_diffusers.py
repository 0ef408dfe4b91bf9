"""diffusers' transformers: each model of its own file with its default config and few blocks, fed by the names of its arguments."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tests.hf.packages import import_package
from tests.hf.today.model import Kwargs
from tests.hf.today.running import Row
from tests.hf.whole.building import run
from tests.hf.whole.running import Subject, not_built

_BLOCKS = re.compile(r"^(num_|n_|n)?(\w+_)?(layers|blocks|depth)$|^(num|n)_layers$|^nlayers$")
_WIDTHS = (
    "joint_attention_dim", "cross_attention_dim", "text_embed_dim", "caption_channels", "text_dim", "context_dim",
    "cap_feat_dim", "in_channels_text", "embedding_dim", "encoder_hidden_dim", "text_in_dim", "in_text_dim",
    "pooled_projection_dim", "attention_head_dim",
)  # fmt: skip
_TEXT, _MOST = 77, 64
_SIZES = {"first": (2, 32), "second": (3, 48)}


def units() -> list[str]:
    """Classes of `diffusers` that are a transformer."""
    package = import_package("diffusers")
    return sorted(name for name in dir(package) if re.search(r"Transformer(\w?\dD)?Model$|DiT\w*Model$", name))


def rows(name: str) -> Iterator[Row]:
    try:
        model = _build(name)
        index, total = _choice(model)
    except Exception as error:  # noqa: BLE001 - one broken model is a row of the table, not the end of it
        yield not_built(name, f"{type(error).__name__}: {error}")
        return
    inputs: Any = {
        label: lambda model, batch=batch, side=side: next(itertools.islice(_choices(model, batch, side), index, None))
        for label, (batch, side) in _SIZES.items()
    }
    yield from Subject(name=name, call="sdpa", build=lambda: _build(name), inputs=inputs, totals=(total, total)).rows()


def _build(name: str) -> nn.Module:
    cls = getattr(import_package("diffusers"), name)
    taken = inspect.signature(cls.__init__).parameters
    few = {
        key: 1
        for key, one in taken.items()
        if _BLOCKS.match(key) and isinstance(one.default, int) and not isinstance(one.default, bool) and one.default > 1
    }
    with torch.device("meta"):
        model: nn.Module = cls(**few)
    return model.to(device="meta", dtype=torch.bfloat16).eval()


def _choice(model: nn.Module) -> tuple[int, int]:
    """Which arguments the model runs with, and its attentions. Raises what it raised with the first."""
    raised: Exception | None = None
    for index, given in enumerate(_choices(model, *_SIZES["first"])):
        try:
            return index, run(model, given, set())[1]
        except Exception as error:  # noqa: BLE001 - the next may be right
            raised = raised or error
    raise raised or TypeError("no arguments to try")


def _choices(model: Any, batch: int, side: int) -> Iterator[Kwargs]:
    taken = inspect.signature(model.forward).parameters
    names = [name for name, one in taken.items() if name in _MADE or one.default is one.empty]
    names = [name for name in names if taken[name].kind is not inspect.Parameter.VAR_KEYWORD]
    unknown = [name for name in names if name not in _MADE]
    if unknown:
        raise TypeError(f"no rule makes {', '.join(unknown)}")
    made = [_MADE[name](model, batch, side) for name in names]
    for values in itertools.islice(itertools.product(*made), _MOST):
        yield dict(zip(names, values, strict=True))


def _config(model: Any, *names: str) -> list[int]:
    found = [getattr(model.config, name, None) for name in names]
    return list(dict.fromkeys(value for value in found if isinstance(value, int) and value))


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device="meta")


def _latents(model: Any, batch: int, side: int) -> Sequence[torch.Tensor]:
    channels = _config(model, "in_channels", "in_dim", "in_visual_dim", "embedding_dim")[:1] or [16]
    return [
        shape
        for c in channels
        for shape in (_zeros(batch, side * side, c), _zeros(batch, c, side, side), _zeros(batch, c, 4, side, side),
                      _zeros(batch, 4, c, side, side), _zeros(batch, c, side * side))
    ]  # fmt: skip


def _text(model: Any, batch: int, side: int) -> Sequence[torch.Tensor]:
    return [_zeros(batch, _TEXT, width) for width in _config(model, *_WIDTHS)[:6]]


def _ids(rows: Callable[[int], int]) -> Callable[[Any, int, int], Sequence[torch.Tensor]]:
    return lambda model, batch, side: [
        _zeros(*shape) for width in (3, 4) for shape in ((rows(side), width), (batch, rows(side), width))
    ]


_MADE: Mapping[str, Callable[[Any, int, int], Sequence[Any]]] = {
    "hidden_states": _latents,
    "encoder_hidden_states": _text,
    "timestep": lambda model, batch, side: [torch.zeros(batch, dtype=torch.long, device="meta")],
    "timesteps": lambda model, batch, side: [torch.zeros(batch, dtype=torch.long, device="meta")],
    "timestep_r": lambda model, batch, side: [torch.zeros(batch, device="meta")],
    "r_timestep": lambda model, batch, side: [torch.zeros(batch, device="meta")],
    "guidance": lambda model, batch, side: [torch.zeros(batch, device="meta")],
    "encoder_attention_mask": lambda model, batch, side: [
        torch.ones(batch, _TEXT, dtype=torch.bool, device="meta"), torch.ones(batch, _TEXT, dtype=torch.long, device="meta")
    ],
    "encoder_hidden_states_mask": lambda model, batch, side: [torch.ones(batch, _TEXT, dtype=torch.bool, device="meta")],
    "pooled_projections": lambda model, batch, side: [
        _zeros(batch, width) for width in _config(model, "pooled_projection_dim", "in_text_dim2")[:2] or [768]
    ],
    "img_ids": _ids(lambda side: side * side),
    "txt_ids": _ids(lambda side: _TEXT),
    "class_labels": lambda model, batch, side: [torch.zeros(batch, dtype=torch.long, device="meta")],
    "original_size": lambda model, batch, side: [_zeros(batch, 2)],
    "target_size": lambda model, batch, side: [_zeros(batch, 2)],
    "crop_coords": lambda model, batch, side: [_zeros(batch, 2)],
    "proj_embedding": lambda model, batch, side: [_zeros(batch, 768)],
    "img_shapes": lambda model, batch, side: [[[(1, side, side)]] * batch],
}  # fmt: skip
