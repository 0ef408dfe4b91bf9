"""Functions of attention and their operands, of the sites that random_sites.py draws, written as models write them. Needs no GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.random_sites import Site


@dataclass(frozen=True, kw_only=True)
class Built:
    """A site's function, its operands, which of these have gradients, the gradient of each output, and queries that have a key.

    call: has an output for each layer. used: bool, to be broadcast to an output; None: all.
    """

    call: Callable[..., tuple[Tensor, ...]]
    operands: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    grad_out: Tensor
    used: Tensor | None


def build(site: Site, *, device: str, dtype: torch.dtype, layers: int = 1) -> Built:
    """Random tensors and the function of them. layers: so many calls of attention, with a mask that all share as in a model.

    Layers with a bias that is learned by each have their own.
    """
    made = torch.Generator().manual_seed(site.seed)
    generator = torch.Generator(device).manual_seed(site.seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype).requires_grad_(site.training)

    has_own = site.mask in ("learned", "table")
    parts = [_operands(site, noise) for _ in range(layers)]
    given = [_mask_inputs(site, noise, made, device) for _ in range(layers if has_own else 1)]
    heads, last = (site.batch, site.heads_q, site.seqlen_q, site.head_dim), site.heads_q * site.head_dim
    grad_out = noise(*(heads if site.layout == "contiguous" else (site.batch, site.seqlen_q, last))).detach()
    names, width = tuple(given[0]), len(parts[0])

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        of_masks = iter(tensors[layers * width :])
        masks = [_mask(site, {name: next(of_masks) for name in names}, like=tensors[0]) for _ in given]
        each = [tensors[layer * width : (layer + 1) * width] for layer in range(layers)]
        return tuple(_attend(site, one, masks[layer if has_own else 0]) for layer, one in enumerate(each))

    tensors = (*itertools.chain(*parts), *itertools.chain(*(one.values() for one in given)))
    return Built(
        call=call,
        operands=tensors,
        leaves=tuple(x for x in tensors if x.requires_grad),
        grad_out=grad_out,
        used=_used(site, given[0]),
    )


def _attend(site: Site, operands: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    q, k, v = _heads(site, operands)
    further: dict[str, Any] = {"attn_mask": mask} if mask is not None else {"is_causal": site.mask == "causal"}
    if site.repeated:
        k, v = (_repeat(x, site.heads_q // site.heads_kv) for x in (k, v))
    elif site.heads_q != site.heads_kv:
        further["enable_gqa"] = True
    out = scaled_dot_product_attention(q, k, v, **further)
    if site.layout == "contiguous":
        return out
    return out.transpose(1, 2).reshape(site.batch, site.seqlen_q, site.heads_q * site.head_dim)


def _operands(site: Site, noise: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    if site.layout == "packed":
        return (noise(site.batch, site.seqlen_q, 3 * site.heads_q * site.head_dim),)
    sizes = ((site.heads_q, site.seqlen_q), (site.heads_kv, site.seqlen_k), (site.heads_kv, site.seqlen_k))
    if site.layout == "contiguous":
        return tuple(noise(site.batch, heads, length, site.head_dim) for heads, length in sizes)
    return tuple(noise(site.batch, length, heads * site.head_dim) for heads, length in sizes)


def _heads(site: Site, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """q, k and v as (B, heads, S, D)."""
    if site.layout == "contiguous":
        return operands
    parts = operands[0].chunk(3, dim=-1) if site.layout == "packed" else operands
    return [x.unflatten(-1, (-1, site.head_dim)).transpose(1, 2) for x in parts]


def _repeat(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def _mask_inputs(site: Site, noise: Callable[..., Tensor], made: torch.Generator, device: str) -> dict[str, Tensor]:
    """What the mask is made from, by names."""
    heads, queries, keys = site.heads_q, site.seqlen_q, site.seqlen_k
    if site.mask in ("left", "right"):
        lengths = torch.randint(max(keys // 3, 1), keys + 1, (site.batch, 1), generator=made)
        lengths[0] = keys
        at = torch.arange(keys)
        kept = at >= keys - lengths if site.mask == "left" else at < lengths
        return {"kept": kept.long().to(device)}
    if site.mask == "documents":
        starts = torch.rand(site.batch, queries, generator=made) < 4 / queries
        return {"ids": starts.cumsum(1).to(device)}
    if site.mask == "alibi":
        return {"slopes": torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)], device=device)}
    if site.mask == "learned":
        return {"bias": noise(1, heads, queries, keys)}
    if site.mask == "table":
        side = math.isqrt(queries)
        at = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        apart = (at[:, None] - at[None]) + side - 1
        index = apart[..., 0] * (2 * side - 1) + apart[..., 1]
        return {"table": noise((2 * side - 1) ** 2, heads), "index": index.to(device)}
    if site.mask == "buckets":
        return {"weight": noise(32, heads)}
    return {}


def _mask(site: Site, given: Mapping[str, Tensor], like: Tensor) -> Tensor | None:
    """As models write it; None where a flag says it. like: whose dtype and device it has."""
    if site.mask in ("none", "causal"):
        return None
    rows = torch.arange(site.seqlen_q, device=like.device)[:, None]
    keys = torch.arange(site.seqlen_k, device=like.device)[None]
    if site.mask == "learned":
        return given["bias"]
    if site.mask == "table":
        return given["table"][given["index"].view(-1)].view(*given["index"].shape, -1).permute(2, 0, 1)[None]
    if site.mask == "buckets":
        return given["weight"][_buckets(keys - rows)].permute(2, 0, 1)[None]
    if site.mask == "alibi":
        bias = given["slopes"][:, None, None] * (keys - rows)
        return bias.masked_fill(keys > rows, -torch.inf)[None].to(like.dtype)
    if site.mask == "window":
        return ((keys <= rows) & (rows - keys < site.window))[None, None]
    if site.mask == "documents":
        allowed = given["ids"][:, None, :, None] == given["ids"][:, None, None, :]
    else:
        allowed = given["kept"][:, None, None, :].bool()
    if site.causal:
        allowed = allowed & (keys <= rows)
    return allowed.expand(site.batch, 1, site.seqlen_q, site.seqlen_k)


def _buckets(distance: Tensor) -> Tensor:
    """T5's, in both directions: 8 distances exactly, 8 by their logarithm."""
    far = distance.abs()
    grown = 8 + (torch.log(far.float() / 8) / math.log(128 / 8) * 8).long()
    return (distance > 0).long() * 16 + torch.where(far < 8, far, grown.clamp(max=15))


def _used(site: Site, given: Mapping[str, Tensor]) -> Tensor | None:
    """Padding in front of a prompt attends to nothing; what comes of it is nobody's."""
    if site.mask != "left" or not site.causal:
        return None
    kept = given["kept"].bool()
    return kept[:, None, :, None] if site.layout == "contiguous" else kept[:, :, None]
