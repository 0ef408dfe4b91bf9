"""Results of one call of a model: outputs by name, loss, gradients, and the distance between two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attn_compiler.spec.numerics import difference, exact_dtype
from attn_compiler.verifying.comparing import is_plain

#: the rank of an output with numbers for each token, and the prefix of an encoder's outputs beside a decoder's
_RANK, _ENCODERS = 3, "encoder_"
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Outputs and gradients in the host's memory. gradients: None if nobody asked for any."""

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """Distance of results from the uncompiled model's.

    largest: the largest absolute difference of any element; infinite if one of the two is not finite. where: the tensor that has it.
    beside: the largest magnitude of any element of the uncompiled model's. others: names that only one of the two has, or has in another
    shape. at_padding: the largest difference at padding positions, which `largest` leaves out; None without padding. cosine: 1 minus the
    smallest cosine of two rows, of one result with two axes; None for others.
    """

    largest: float
    where: str
    beside: float
    others: tuple[str, ...] = ()
    at_padding: float | None = None
    cosine: float | None = None


def outputs_of(value: Any) -> dict[str, torch.Tensor]:
    """Return every tensor in a model's output, by its path through lists, dicts, dataclasses, and objects such as caches."""
    return dict(_tensors(value, "", set()))


def _tensors(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name or "output", value
        return
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    for key, inner in _parts(value):
        yield from _tensors(inner, f"{name}{key}" if key.startswith("[") or not name else f"{name}.{key}", seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        yield from zip(fields or (f"[{i}]" for i in range(len(value))), value, strict=True)
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif not callable(value):
        yield from getattr(value, "__dict__", {}).items()


def loss_of(
    outputs: Mapping[str, torch.Tensor], noise: dict[str, torch.Tensor], padding: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return the loss of a training step: the model's own, else the outputs' product with fixed noise.

    The noise weighs every element alike, and padding not at all. None if no output needs a gradient. noise: drawn so far, by output.
    padding: as for `distance`.
    """
    trained = {name: x for name, x in outputs.items() if x.requires_grad}
    own = trained.get("loss")
    if own is not None and own.numel() == 1:
        return own.reshape(())
    terms = []
    for name, x in trained.items():
        if name not in noise:
            generator = torch.Generator().manual_seed(1)
            drawn = torch.randn(x.shape, generator=generator) / max(x.numel(), 1) ** 0.5
            if padding is not None and _is_padded(name, x, padding, outputs):
                drawn[padding] = 0
            noise[name] = drawn.to(x.device)
        real = torch.view_as_real(x)[..., 0] if x.is_complex() else x
        terms.append((real.float() * noise[name]).sum())
    return torch.stack([term.to(terms[0].device) for term in terms]).sum() if terms else None


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors with comparable elements to the host's memory."""
    return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items() if is_plain(x)}


def distance(
    new: Mapping[str, torch.Tensor | None], own: Mapping[str, torch.Tensor | None], padding: torch.Tensor | None = None
) -> Distance:
    """Measure how far results are from the uncompiled model's. A gradient that is None counts as zeros.

    padding: bool (batch, tokens) in the host's memory, True at padding, where an output (batch, tokens, numbers) is undefined. None: no
    padding.
    """
    others = [name for name in dict.fromkeys((*new, *own)) if name not in new or name not in own]
    largest, where, beside = 0.0, "", 0.0
    at_padding: float | None = None
    for name in (name for name in own if name in new):
        x, y = _wide(new[name]), _wide(own[name])
        if x is None or y is None:
            x, y = (x if x is not None else _zeros(y)), (y if y is not None else _zeros(x))
        if x is None or y is None:
            continue
        if x.shape != y.shape:
            others.append(name)
            continue
        if padding is not None and _is_padded(name, y, padding, own):
            at_padding = max(at_padding or 0.0, _largest(x[padding], y[padding]))
            x, y = x[~padding], y[~padding]
        if not y.numel():
            continue
        off = _largest(x, y)
        beside = max(beside, float(y.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()))
        if off > largest or not where:
            largest, where = max(off, largest), name
    return Distance(
        largest=largest,
        where=where,
        beside=beside,
        others=tuple(others),
        at_padding=at_padding,
        cosine=_cosine(new, own),
    )


def _cosine(new: Mapping[str, torch.Tensor | None], own: Mapping[str, torch.Tensor | None]) -> float | None:
    """Return 1 minus the smallest cosine of the rows of one embedding and its own; None for other results."""
    if len(new) != 1 or new.keys() != own.keys():
        return None
    (x,), (y,) = new.values(), own.values()
    if x is None or y is None or x.dim() != 2 or x.shape != y.shape or not x.is_floating_point() or not x.numel():
        return None
    return 1.0 - float(torch.nn.functional.cosine_similarity(x.double(), y.double()).min())


def _is_padded(name: str, x: torch.Tensor, padding: torch.Tensor, all_of_them: Mapping[str, Any]) -> bool:
    """Return True if the output `name` holds numbers for each token of `padding`: (batch, tokens, numbers). In an output of rank 2, the
    second axis may be classes; of rank 4, heads. Beside an encoder's outputs, a decoder's are of other tokens."""
    has_encoder = any(one.startswith(_ENCODERS) for one in all_of_them)
    return x.dim() == _RANK and x.shape[:2] == padding.shape and (name.startswith(_ENCODERS) or not has_encoder)


def _largest(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(difference(x, y).max()) if y.numel() else 0.0


def _wide(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None:
        return None
    real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return real.to(exact_dtype(real.dtype) if real.is_floating_point() else torch.float64)


def _zeros(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else torch.zeros_like(x)
