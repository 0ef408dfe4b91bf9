"""The op that makes lists of tiles: `attn_compiler::tile_lists(Tensor some, Tensor holes, bool by_key) -> Tensor`.

some, holes: bool (B|1, Hq|1, nQ, nK), of any strides. some: a pair of the tile is allowed. holes: a pair of it is not. The result is int32
(B|1, Hq|1, n, m + 3): for each of the n blocks of queries (by_key: of keys) its numbers, as `Plan` has them.

An op of its own, since Inductor takes seconds to compile the sort that plain nodes need: 12 to 48 s for 32 to 128 blocks on an H200 machine
(torch 2.11). On a GPU one Triton kernel makes the lists of any number of blocks (kernels/tile_lists.py).
"""

from __future__ import annotations

import torch

from attn_compiler.lowerings.shared.ops import late, register_helper

#: numbers in front of a list: how many tiles need the mask, then first and end of the run that does not
HEAD = 3


def empty_lists(some: torch.Tensor, by_key: bool) -> torch.Tensor:
    """The result, unfilled."""
    batch, heads, queries, keys = some.shape
    rows, length = (keys, queries) if by_key else (queries, keys)
    return torch.empty((batch, heads, rows, length + HEAD), dtype=torch.int32, device=some.device)


def listed(some: torch.Tensor, holes: torch.Tensor, by_key: bool) -> torch.Tensor:
    """The same by PyTorch's ops, on any device."""
    if by_key:
        some, holes = some.transpose(2, 3), holes.transpose(2, 3)
    first, end, inside = _longest_run(some & ~holes)
    partial = some & ~inside
    # Stable, so blocks that need the mask come first, in the order that they stand in.
    order = torch.argsort((~partial).to(torch.uint8), dim=-1, stable=True)
    return torch.cat([partial.sum(-1, keepdim=True), first, end, order], -1).to(torch.int32)


def _longest_run(full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First and end of the first of the longest runs of blocks that are allowed in full, (…, 1), and which blocks are in it.

    A run is visited without reading any list. Padding, windows and documents have but one.
    """
    at = torch.arange(full.shape[-1], device=full.device)
    gaps = torch.where(full, -1, at).cummax(-1).values
    so_far = torch.where(full, at - gaps, 0)
    length = so_far.amax(-1, keepdim=True)
    end = so_far.argmax(-1, keepdim=True) + 1
    first = end - length
    return first, end, (at >= first) & (at < end)


def _fake(some: torch.Tensor, holes: torch.Tensor, by_key: bool) -> torch.Tensor:
    return empty_lists(some, by_key)


register_helper(
    "tile_lists",
    "(Tensor some, Tensor holes, bool by_key) -> Tensor",
    function=listed,
    fake=_fake,
    on_gpu=late("shared.listing_launch", "lists"),
    notes=True,
)
