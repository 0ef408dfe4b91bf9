"""Attention sites as architectures have them, drawn by a seed: what the choice of kernels is held against, and never tuned for.

A site is one call of attention in a small function, written as models write it: its head dims, lengths, heads, mask and strides are
drawn from those of a family. No site takes more memory or arithmetic than `MOST_BYTES` and `MOST_FLOPS`. Needs no GPU.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


# ---- drawing ------------------------------------------------------------------------------------------------------


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


_VISION = ((3, 3, 64), (6, 6, 64), (12, 12, 64), (16, 16, 64), (16, 16, 72), (16, 16, 80), (24, 24, 64), (16, 16, 88))
_DECODERS = (
    *((32, 8, 128), (16, 16, 64), (64, 8, 128), (8, 4, 256), (24, 8, 128), (14, 2, 64), (32, 32, 96), (32, 32, 80)),
    *((16, 8, 256), (40, 40, 128), (8, 1, 256), (28, 4, 128), (9, 3, 64), (12, 2, 128), (64, 8, 64), (16, 2, 512)),
)
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_FAMILIES = (
    _Family(
        name="vision",
        heads=_VISION,
        queries=(49, 50, 64, 196, 197, 256, 257, 577, 729, 1024, 1025, 1370, 2305),
        batches=_POWERS,
        masks=("none",),
        jitter=0.2,
    ),
    _Family(
        name="windows",
        heads=((3, 3, 32), (4, 4, 32), (6, 6, 32), (8, 8, 32), (12, 12, 32), (16, 16, 32), (24, 24, 32), (32, 32, 32)),
        queries=(49, 64, 144, 196, 256),
        batches=(8, 16, 32, 64, 128, 256, 512),
        masks=("table",),
        jitter=0.0,
    ),
    _Family(
        name="biased",
        heads=((12, 12, 64), (16, 16, 64), (8, 8, 32), (4, 4, 32), (20, 20, 64)),
        queries=(145, 197, 257, 384, 511, 577, 901, 1025),
        batches=(1, 2, 4, 8, 16, 32, 64),
        masks=("learned", "buckets"),
    ),
    _Family(
        name="encoder",
        heads=((12, 12, 64), (16, 16, 64), (12, 12, 32), (20, 20, 64), (16, 16, 32), (25, 25, 128)),
        queries=(64, 128, 256, 384, 512, 1024, 2048, 8192),
        batches=_POWERS,
        masks=("right", "right", "none", "documents", "buckets"),
    ),
    _Family(
        name="decoder",
        heads=_DECODERS,
        queries=(64, 200, 512, 777, 1024, 2048, 3000, 4096),
        batches=(1, 1, 2, 4, 8, 16, 32, 64),
        masks=("causal", "causal", "left", "right"),
        causal=True,
    ),
    _Family(
        name="long decoder",
        heads=_DECODERS,
        queries=(1024, 2048, 3000, 4096, 8192, 16384, 32768),
        batches=(1, 1, 2, 4, 8),
        masks=("causal", "causal", "window", "window", "documents", "alibi"),
        causal=True,
    ),
    _Family(
        name="decoding",
        heads=_DECODERS,
        queries=(1,),
        keys=(129, 512, 1000, 1024, 2048, 4096, 8191, 16384, 32768),
        batches=_POWERS,
        masks=("none", "left"),
        trains=0.0,
    ),
    _Family(
        name="diffusion",
        heads=(
            (24, 24, 128),
            (24, 24, 64),
            (10, 10, 64),
            (20, 20, 64),
            (12, 12, 128),
            (32, 32, 64),
            (8, 8, 40),
            (8, 8, 80),
        ),
        queries=(256, 1024, 1536, 4096, 4250, 4608, 8100, 9216, 15600),
        batches=(1, 2, 4, 8, 16),
        masks=("none", "none", "none", "right"),
        trains=0.3,
    ),
    _Family(
        name="cross",
        heads=(
            (8, 8, 64),
            (12, 12, 64),
            (16, 16, 64),
            (20, 20, 64),
            (24, 24, 128),
            (8, 8, 160),
            (10, 10, 64),
            (32, 8, 128),
        ),
        queries=(1, 32, 64, 128, 448, 1024, 4096, 9216),
        keys=(49, 77, 226, 257, 512, 1500, 4097),
        batches=(1, 2, 4, 8, 16, 32, 64),
        masks=("none", "none", "right"),
        trains=0.4,
    ),
)


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
