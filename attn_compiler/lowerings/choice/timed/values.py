"""Real tensors for a site in the place of fake ones, of the same shapes and strides, with typical values.

Masks that are made from run-time tensors let through three quarters of the keys on average: batch rows keep from all to half of
theirs. Packed rows hold four documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_compiler.index_expr.on_tensors import evaluate_on
from attn_compiler.spec import masks, reads
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.mask_kinds import Document, KeyBound, KeyPadding, MaskKind

_DOCUMENTS = 4
#: A padding mask that keeps a smaller part of the keys is taken to have 0 and 1 exchanged.
_LEAST_KEPT = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteTensors:
    """Tensors that a lowering reads at a site besides q, k and v, fake or real (lowerings/base.py, Operands).

    mask: the dense mask or bias. sinks: (Hq,). loads, score_loads: by their names in the spec.
    """

    mask: Tensor | None = None
    sinks: Tensor | None = None
    loads: Mapping[str, Tensor] = field(default_factory=dict)
    score_loads: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RealTensors:
    """q, k, v: logical BHSD, with numbers. further: the other tensors of the site."""

    q: Tensor
    k: Tensor
    v: Tensor
    further: SiteTensors


class NoValues(Exception):
    """No tensors can stand for those of the site. Internal: the site keeps the choice of the rows."""


def real(spec: AttentionSpec, fakes: SiteTensors, device: torch.device) -> RealTensors:
    """Return tensors with numbers, on `device`. Draws from a generator of its own. Raises NoValues."""
    draw = torch.Generator(device).manual_seed(0)
    sinks, bias = spec.score.sinks, spec.score.bias
    loads = _loads(spec, fakes.loads, device)
    rows = max((x.shape[0] for x in fakes.score_loads.values() if x.dim() and x.is_floating_point()), default=1)
    further = SiteTensors(
        mask=None if fakes.mask is None else _mask(spec, fakes.mask, loads, draw, device),
        sinks=None if fakes.sinks is None else _noise(fakes.sinks, draw, device),
        loads=loads,
        score_loads={
            name: _noise(x, draw, device) if x.is_floating_point() else _counting(x, rows, device)
            for name, x in fakes.score_loads.items()
        },
    )
    if further.sinks is not None and sinks is not None:
        further.sinks.requires_grad_(sinks.requires_grad)
    if further.mask is not None and bias is not None:
        further.mask.requires_grad_(bias.requires_grad)
    q, k, v = (_noise(_meta(x), draw, device).requires_grad_(x.requires_grad) for x in (spec.q, spec.k, spec.v))
    return RealTensors(q=q, k=k, v=v, further=further)


def _meta(x: TensorSpec) -> Tensor:
    shape, strides = (tuple(map(_whole, sizes)) for sizes in (x.shape, x.strides))
    return torch.empty_strided(shape, strides, dtype=getattr(torch, x.dtype), device="meta")


def _lying_as(fake: Tensor, device: torch.device) -> Tensor:
    """Allocate memory for a tensor of these strides, which may overlap. `as_strided` makes the tensor from it."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True) if size)
    return torch.empty(extent if fake.numel() else 0, dtype=fake.dtype, device=device)


def _noise(fake: Tensor, draw: torch.Generator, device: torch.device) -> Tensor:
    base = _lying_as(fake, device).normal_(generator=draw)
    return base.as_strided(fake.shape, fake.stride())


def _counting(fake: Tensor, rows: int, device: torch.device) -> Tensor:
    """Return indices into a table of so many rows, each as often as any other."""
    base = _lying_as(fake, device)
    base.copy_(torch.arange(base.numel(), device=device) % rows)
    return base.as_strided(fake.shape, fake.stride())


def _as_fake(values: Tensor, fake: Tensor, device: torch.device) -> Tensor:
    """Return values in the strides and the dtype of a fake tensor of the same shape. A repeated axis takes its first value."""
    base = _lying_as(fake, device)
    repeats = [axis for axis, stride in enumerate(fake.stride()) if stride == 0]
    for axis in repeats:
        values = values.narrow(axis, 0, 1)
    base.as_strided(values.shape, fake.stride()).copy_(values)
    return base.as_strided(fake.shape, fake.stride())


# ---- masks ------------------------------------------------------------------------------------------------------------


def _loads(spec: AttentionSpec, fakes: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for kind in spec.mask.kinds:
        names = sorted(reads.tensors(kind) - found.keys())
        if names:
            found |= _loads_of(kind, {name: fakes[name] for name in names if name in fakes}, spec, device)
    return found


def _loads_of(
    kind: MaskKind, fakes: Mapping[str, Tensor], spec: AttentionSpec, device: torch.device
) -> dict[str, Tensor]:
    keys = _whole(spec.seqlen_kv)
    if isinstance(kind, Document):
        return {name: _along_keys(fake, keys, device, of_row=None) for name, fake in fakes.items()}
    if not isinstance(kind, KeyPadding | KeyBound):
        raise NoValues(f"{kind.words} reads tensors")
    for outside in (0, 1):
        filled = {name: _along_keys(fake, keys, device, of_row=outside) for name, fake in fakes.items()}
        if float(_evaluated((kind,), filled, spec, device, few_queries=True).float().mean()) >= _LEAST_KEPT:
            return filled
    raise NoValues(f"no padding was found that {kind.words} keeps")


def _along_keys(fake: Tensor, keys: int, device: torch.device, *, of_row: int | None) -> Tensor:
    """Return numbers of keys, or of batch rows. of_row: the value at padding, where real keys have the other of 0 and 1. None:
    documents."""
    if fake.is_floating_point() or fake.dim() not in (1, 2) or (fake.dim() == 2 and fake.shape[1] != keys):
        raise NoValues(f"a mask reads {tuple(fake.shape)} of {fake.dtype}")
    rows = fake.shape[0]
    kept = keys - (torch.arange(rows, device=device) * (keys // 2)) // max(rows, 1)
    at = torch.arange(keys, device=device)
    if fake.dim() == 1:
        values = kept
    elif of_row is None:
        values = (at // max(1, -(-keys // _DOCUMENTS))).expand(rows, keys)
    else:
        values = (at[None] < kept[:, None]).long() ^ of_row
    return _as_fake(values.to(fake.dtype), fake, device)


def _mask(
    spec: AttentionSpec, fake: Tensor, loads: Mapping[str, Tensor], draw: torch.Generator, device: torch.device
) -> Tensor:
    """Return the dense mask or bias: its proved kinds, and noise where numbers are added."""
    shape = (1,) * (4 - fake.dim()) + tuple(fake.shape)
    allowed = _evaluated(spec.mask.held, loads, spec, device)
    for axis, size in enumerate(shape):
        allowed = allowed.narrow(axis, 0, 1) if size == 1 else allowed
    allowed = allowed.expand(shape).reshape(fake.shape)
    if fake.dtype == torch.bool:
        return _as_fake(allowed, fake, device)
    found = _noise(fake, draw, device)
    if spec.mask.held:
        found = _as_fake(found.masked_fill(~allowed, torch.finfo(fake.dtype).min), fake, device)
    return found


def _evaluated(
    kinds: Iterable[MaskKind],
    loads: Mapping[str, Tensor],
    spec: AttentionSpec,
    device: torch.device,
    *,
    few_queries: bool = False,
) -> Tensor:
    """Return which pairs take part, (B, 1 or Hq, Sq, Skv). few_queries: of the first query alone."""
    sizes = spec.batch, spec.num_heads_q, 1 if few_queries else spec.seqlen_q, spec.seqlen_kv
    values: dict[str, int | Tensor] = {"Sq": _whole(spec.seqlen_q), "Skv": _whole(spec.seqlen_kv)}
    for axis, (name, size) in enumerate(zip("bhqk", sizes, strict=True)):
        one = [1] * 4
        one[axis] = -1
        values[name] = torch.arange(_whole(size), device=device).view(one)
    found = evaluate_on(masks.all_of(tuple(kinds)), values, loads)
    heads = found.shape[1] if found.dim() == 4 else 1
    return found.expand(_whole(sizes[0]), heads, _whole(sizes[2]), _whole(sizes[3]))


def _whole(size: int | str) -> int:
    if not isinstance(size, int):
        raise NoValues(f"the size {size} is symbolic")
    return size
