"""Calls the kernel that makes lists of tiles. Imports triton, so it comes late."""

from __future__ import annotations

from typing import Any

import torch

from attn_compiler.lowerings.shared.kernels.tile_lists import tile_lists
from attn_compiler.lowerings.shared.launching import Arguments, alike, launch
from attn_compiler.lowerings.shared.listing import HEAD, empty_lists
from attn_compiler.lowerings.shared.on_device import on


def lists(some: torch.Tensor, holes: torch.Tensor, by_key: bool) -> torch.Tensor:
    """As `listing.listed`."""
    same = alike(f"tile_lists {by_key}", [some, holes])
    with on(some.device):
        made = same.empty("lists", lambda: empty_lists(some, by_key))
        tensors = {"some": some, "holes": holes, "lists": made}
        launch(tile_lists, same, tensors, lambda: _arguments(some, holes, made, by_key))
    return made


def _arguments(some: torch.Tensor, holes: torch.Tensor, made: torch.Tensor, by_key: bool) -> Arguments:
    batch, heads, rows, columns = made.shape
    numbers: dict[str, Any] = {"heads": heads, "rows": rows, "length": columns - HEAD}
    for name, x in (("some", some), ("holes", holes)):
        strides = dict(zip(("batch", "head", "row", "tile"), x.stride(), strict=True))
        if by_key:
            strides["row"], strides["tile"] = strides["tile"], strides["row"]
        numbers |= {f"{name}_{axis}": stride for axis, stride in strides.items()}
    names = {name: name for name in ("some", "holes", "lists")}
    return Arguments(grid=(batch * heads * rows, 1, 1), tensors=names, numbers=numbers)
