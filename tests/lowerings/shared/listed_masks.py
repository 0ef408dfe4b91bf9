"""Masks whose lists of tiles are asked for, and the arguments of the op that makes them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from attn_compiler.lowerings.shared.ops.listing import HOLES, OPEN, SOME, UNIT, ListAsked
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings.shared.searched_tiles import Mask, tensors

PARTS = (("rows",), ("keys",), ("documents_q", "documents_k"), ("mask",))
BANDS = [None, Band(right=0), Band(left=40, right=3), Band(right=0, left=90, from_end=True), Band(left=-5)]
TILES = [(32, 32), (128, 64), (64, 256)]


def units_of(mask: Tensor) -> Tensor:
    """What each 32 × 32 pairs of a dense mask hold."""
    rows = []
    for i in range(0, mask.shape[2], UNIT):
        blocks = [mask[:, :, i : i + UNIT, j : j + UNIT] for j in range(0, mask.shape[3], UNIT)]
        rows.append(torch.stack([x.any((2, 3)) * SOME + (~x).any((2, 3)) * HOLES for x in blocks], -1))
    return torch.stack(rows, 2).to(torch.uint8)


def asked(mask: Mask, tile: tuple[int, int], *, by_key: bool) -> ListAsked:
    band = Band() if mask.band is None else mask.band
    left, right = (OPEN if side is None else side for side in (band.left, band.right))
    return ListAsked(
        rows=mask.have.get("rows"),
        keys=mask.have.get("keys"),
        documents_q=mask.have.get("documents_q"),
        documents_k=mask.have.get("documents_k"),
        units=units_of(mask.have["mask"]) if "mask" in mask.have else None,
        seqlen_q=mask.seqlen_q,
        seqlen_kv=mask.seqlen_kv,
        left=left,
        right=right,
        from_end=band.from_end,
        queries=tile[0],
        keys_of=tile[1],
        by_key=by_key,
        ordered=True,
    )


def arguments(one: ListAsked) -> tuple[Any, ...]:
    return tuple(getattr(one, name) for name in ListAsked.__slots__)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    seqlen_q, seqlen_kv = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    chosen = draw(st.lists(st.sampled_from(PARTS), min_size=1, unique=True))
    have = tensors(seqlen_q, seqlen_kv, tuple(itertools.chain(*chosen)), draw(st.integers(0, 99)))
    return Mask(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, band=draw(st.sampled_from(BANDS)), have=have)
