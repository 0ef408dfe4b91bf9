"""Attention sites as architectures have them, drawn by a seed: what the choice of kernels is held against, and never tuned for.

A site is one call of attention in a small function, written as models write it: its head dims, lengths, heads, mask and strides are drawn
from those of a family. No site takes more memory or arithmetic than `MOST_BYTES` and `MOST_FLOPS`. Needs no GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.models import read

#: of operands, dense masks and gradients together
MOST_BYTES = 400e6
#: of all pairs, whether they are masked or not: 20 ms at 60 TFLOP/s
MOST_FLOPS = 1.2e12
# Where no fused kernel may take a site: some copies of them are held in 32 bits.
_MOST_SCORES = 250e6
_DENSE = ("window", "left", "right", "documents", "alibi", "learned", "table", "buckets")
_BIASES = ("alibi", "learned", "table", "buckets")
#: layouts: (B, S, heads·D) as projections give it, q, k and v in one such tensor, (B, heads, S, D)
LAYOUTS = ("projected", "packed", "contiguous")


@dataclass(frozen=True, kw_only=True)
class Site:
    """One call. mask: "none", "causal", "window", "left", "right", "documents", "alibi", "learned", "table" (Swin), "buckets" (T5).

    causal: beside a mask that leaves it open. repeated: k and v are repeated for their query heads, as without enable_gqa.
    """

    family: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    mask: str
    causal: bool
    window: int
    layout: str
    repeated: bool
    training: bool
    seed: int

    @property
    def columns(self) -> dict[str, str]:
        """Its fields, for a row."""
        return {field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @property
    def flops(self) -> float:
        """Of all pairs: twice two products forward, two and a half times that backward."""
        pairs = self.batch * self.heads_q * self.seqlen_q * self.seqlen_k
        return 4.0 * pairs * self.head_dim * (3.5 if self.training else 1.0)

    @property
    def bytes(self) -> float:
        """Of its tensors in 16 bits, of their gradients, and of a mask as a model may write it out."""
        queries = 2 * self.batch * self.heads_q * self.seqlen_q * self.head_dim
        keys = 2 * self.batch * (self.heads_q if self.repeated else self.heads_kv) * self.seqlen_k * self.head_dim
        batch = self.batch if self.mask in ("left", "right", "documents") else 1
        heads = self.heads_q if self.mask in _BIASES else 1
        dense = batch * heads * self.seqlen_q * self.seqlen_k * (self.mask in _DENSE)
        return 2.0 * (queries + keys + dense) * (2 if self.training else 1)

    @property
    def fits(self) -> bool:
        """Whether it is within the bounds."""
        scores = self.batch * self.heads_q * self.seqlen_q * self.seqlen_k
        unfused = self.head_dim > 256 or (self.training and self.mask in ("learned", "table", "buckets"))
        few = not unfused or scores <= _MOST_SCORES
        return self.flops <= MOST_FLOPS and self.bytes <= MOST_BYTES and few

    @property
    def shortened(self) -> Site:
        """The same for a look at the script."""
        group = self.heads_q // self.heads_kv
        kv = min(self.heads_kv, 2)
        # A window of Swin's stays a square.
        lengths = (min(self.seqlen_q, 49), min(self.seqlen_k, 49 if self.seqlen_q == self.seqlen_k else 65))
        few: dict[str, Any] = {"batch": min(self.batch, 2), "heads_q": kv * min(group, 2), "heads_kv": kv}
        few |= {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "window": min(self.window, 16), "head_dim": 32}
        return dataclasses.replace(self, **few)


@dataclass(frozen=True, kw_only=True)
class _Family:
    """heads: (of q, of k and v, head dim). queries, keys: lengths that its models have; keys: None for those of the queries."""

    name: str
    heads: Sequence[tuple[int, int, int]]
    queries: Sequence[int]
    keys: Sequence[int] | None = None
    batches: Sequence[int]
    masks: Sequence[str]
    causal: bool = False
    trains: float = 0.5
    jitter: float = 0.5


_FAMILIES = tuple(_Family(name=name, **given) for name, given in read("random_sites.toml").items())


def sites(seed: int, count: int) -> list[Site]:
    """So many sites of a seed. The first ones of more are the same."""
    found: list[Site] = []
    draw = random.Random(seed)
    while len(found) < count:
        family = _FAMILIES[len(found) % len(_FAMILIES)]
        site = _draw(draw, family)
        if site.fits:
            found.append(site)
    return found


def _draw(draw: random.Random, family: _Family) -> Site:
    heads_q, heads_kv, head_dim = draw.choice(family.heads)
    queries = _length(draw, family.queries, family.jitter)
    keys = queries if family.keys is None else _length(draw, family.keys, family.jitter)
    mask = draw.choice(family.masks)
    window = draw.choice((128, 256, 512, 1000, 1024, 4096)) if mask == "window" else 0
    layouts = LAYOUTS if heads_q == heads_kv and queries == keys else ("projected", "contiguous")
    return Site(
        family=family.name,
        batch=draw.choice(family.batches),
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=queries,
        seqlen_k=keys,
        head_dim=head_dim,
        mask=mask,
        causal=family.causal,
        window=window,
        layout=draw.choice(layouts),
        repeated=heads_q != heads_kv and draw.random() < 0.5,
        # Left padding is of prompts.
        training=draw.random() < family.trains and mask != "left",
        seed=draw.randrange(1 << 30),
    )


def _length(draw: random.Random, known: Sequence[int], jitter: float) -> int:
    """One that models have or, with this probability, any between the shortest and the longest."""
    if draw.random() >= jitter:
        return draw.choice(known)
    return round(math.exp(draw.uniform(math.log(min(known)), math.log(max(known)))))


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
