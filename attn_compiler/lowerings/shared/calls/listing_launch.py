"""Launches of the kernels that make lists of tiles. Imports triton, so this module is imported late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.shared.calls.arguments import along
from attn_compiler.lowerings.shared.calls.leaf_calls import or_else
from attn_compiler.lowerings.shared.kernels.tile_lists import tile_bounds, tile_lists, tile_order
from attn_compiler.lowerings.shared.launching.launch import Arguments, launch
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.lowerings.shared.launching.replaying import CallCache, call_cache
from attn_compiler.lowerings.shared.ops.listing import OF_KEYS, OF_QUERIES, UNIT, ListAsked, listed

#: blocks of the other side that a program reads at once, at most
_BLOCK = 128
#: units that a program reads at once, at most: a tile may have many
_UNITS_AT_ONCE = 2048

#: blocks that a program sorts
_ORDERED = 64

#: the parameters of the kernel that reduces blocks, and the tensors of `ListAsked`
_SUMMED = {"Rows": "rows", "Keys": "keys", "DocumentsQ": "documents_q", "DocumentsK": "documents_k"}


def lists(*given: Any) -> Tensor:
    """Compute the op as `listing.listed` does."""
    return or_else("tile_lists", "tile_lists", lambda: _by_kernels(*given), lambda: listed(*given))


def _by_kernels(*given: Any) -> Tensor:
    asked = ListAsked.from_arguments(*given)
    have = asked.tensors
    same = call_cache("tile_lists", f"{tuple(have)} {asked.numbers}", list(have.values()))
    with on(same.device):
        have |= {"lists": (made := same.empty("lists", asked.empty))}
        bounds = _bounds(same, asked, made)
        if set(_SUMMED.values()) & set(have):
            launch(tile_bounds, same, have | bounds, lambda: _bounds_arguments(asked, made))
        launch(tile_lists, same, have | bounds, lambda: _lists_arguments(asked, made))
        if asked.ordered:
            launch(tile_order, same, have, lambda: _order_arguments(asked, made))
    return made


def _bounds(same: CallCache, asked: ListAsked, made: Tensor) -> dict[str, Tensor]:
    queries, keys = asked.blocks

    def room(numbers: int, blocks: int) -> Tensor:
        return torch.empty((made.shape[0], numbers, blocks), dtype=torch.int32, device=made.device)

    return {
        "of_queries": same.empty("of_queries", lambda: room(OF_QUERIES, queries)),
        "of_keys": same.empty("of_keys", lambda: room(OF_KEYS, keys)),
    }


def _sizes(asked: ListAsked) -> dict[str, int]:
    queries, keys = asked.blocks
    sizes = {"seqlen_q": asked.seqlen_q, "seqlen_kv": asked.seqlen_kv, "QUERIES": asked.queries, "KEYS": asked.keys_of}
    return {"blocks_q": queries, "blocks_k": keys, **sizes}


def _bounds_arguments(asked: ListAsked, made: Tensor) -> Arguments:
    strides = {
        "rows_side": along(asked.rows, 0),
        "rows_b": along(asked.rows, 1),
        "keys_b": along(asked.keys, 0),
        "documents_qb": along(asked.documents_q, 0),
        "documents_kb": along(asked.documents_k, 0),
    }
    tensors = {name: (own if own in asked.tensors else None) for name, own in _SUMMED.items()}
    return Arguments(
        grid=(sum(asked.blocks), made.shape[0], 1),
        tensors=tensors | {"OfQueries": "of_queries", "OfKeys": "of_keys"},
        numbers=_sizes(asked) | strides,
    )


def _lists_arguments(asked: ListAsked, made: Tensor) -> Arguments:
    left, right = asked.band
    batch, heads = made.shape[:2]
    units = {f"units_{name}": along(asked.units, axis) for axis, name in enumerate("bhqk")}
    has = {
        "HAS_ROWS": asked.rows is not None,
        "HAS_KEYS": asked.keys is not None,
        "HAS_DOCUMENTS": asked.documents_q is not None,
    }
    return Arguments(
        grid=(asked.blocks[asked.by_key], heads, batch),
        tensors={
            "OfQueries": "of_queries",
            "OfKeys": "of_keys",
            "Units": None if asked.units is None else "units",
            "Lists": "lists",
        },
        numbers=_sizes(asked)
        | {"heads": heads, "band_left": left, "band_right": right, "BY_KEY": asked.by_key, "BLOCK": _block(asked)}
        | units
        | has,
    )


def _order_arguments(asked: ListAsked, made: Tensor) -> Arguments:
    blocks = asked.blocks[asked.by_key]
    return Arguments(
        grid=(-(-blocks // _ORDERED), made.shape[0] * made.shape[1], 1),
        tensors={"Lists": "lists"},
        numbers={"rows": blocks, "width": made.stride(2), "BLOCK": _ORDERED},
    )


def _block(asked: ListAsked) -> int:
    """Return the blocks that a program reads at once."""
    if asked.units is None:
        return _BLOCK
    units = (asked.queries // UNIT) * (asked.keys_of // UNIT)
    return max(min(_UNITS_AT_ONCE // units, _BLOCK), 1)
