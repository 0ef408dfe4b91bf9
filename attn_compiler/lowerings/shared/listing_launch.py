"""Calls the kernel that makes lists of tiles. Imports triton, so it comes late."""

from __future__ import annotations

from typing import Any

import torch

from attn_compiler.lowerings.shared.kernels.tile_lists import tile_lists
from attn_compiler.lowerings.shared.launching import Arguments, alike, launch
from attn_compiler.lowerings.shared.listing import HEAD, SURPLUS, Asked
from attn_compiler.lowerings.shared.on_device import on

#: elements of the other side that a program reads at once
_AT_ONCE = 4096
#: blocks of the other side that a program reads at once, at most
_MOST = 128

#: the kernel's parameters and the tensors of `Asked`
_TENSORS = {"Rows": "rows", "Keys": "keys", "DocumentsQ": "documents_q", "DocumentsK": "documents_k", "Units": "units"}


def lists(*given: Any) -> torch.Tensor:
    """As `listing.listed`."""
    asked = Asked(**dict(zip(Asked.__slots__, given, strict=True)))
    have = asked.tensors
    same = alike(f"tile_lists {tuple(have)} {asked.numbers}", list(have.values()))
    with on(same.device):
        made = same.empty("lists", asked.empty)
        launch(tile_lists, same, have | {"lists": made}, lambda: _arguments(asked, made))
    return made


def _arguments(asked: Asked, made: torch.Tensor) -> Arguments:
    batch, heads, lists_of_head, columns = made.shape
    rows = lists_of_head - SURPLUS
    left, right = asked.band
    other = asked.queries if asked.by_key else asked.keys_of
    sizes = {"seqlen_q": asked.seqlen_q, "seqlen_kv": asked.seqlen_kv, "band_left": left, "band_right": right}
    switches = {"QUERIES": asked.queries, "KEYS": asked.keys_of, "BY_KEY": asked.by_key}
    return Arguments(
        grid=(batch * heads * rows, 1, 1),
        tensors={name: (own if own in asked.tensors else None) for name, own in _TENSORS.items()} | {"Lists": "lists"},
        numbers={"heads": heads, "rows": rows, "length": columns - HEAD}
        | sizes
        | _strides(asked)
        | switches
        | {"BLOCK": min(_AT_ONCE // other, _MOST)},
    )


def _strides(asked: Asked) -> dict[str, int]:
    """Of the axes that a list goes by; 0 for an axis of one element, which stands for all."""

    def stride(x: torch.Tensor | None, axis: int) -> int:
        return 0 if x is None or x.shape[axis] == 1 else x.stride(axis)

    return {
        "rows_side": stride(asked.rows, 0),
        "rows_b": stride(asked.rows, 1),
        "keys_b": stride(asked.keys, 0),
        "documents_qb": stride(asked.documents_q, 0),
        "documents_kb": stride(asked.documents_k, 0),
        **{f"units_{name}": stride(asked.units, axis) for axis, name in enumerate("bhqk")},
    }
