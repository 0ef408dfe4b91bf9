"""The gradients of what is added to the scores, or beside them: learned biases, numbers by distance, sinks.

Imports triton, so it comes late.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton

from attn_compiler.lowerings.kernels import bias_backward, sums_backward
from attn_compiler.lowerings.launching import Arguments
from attn_compiler.lowerings.ops import empty_gradient
from attn_compiler.lowerings.triton_arguments import STATS_BLOCK, Prepared
from attn_compiler.lowerings.triton_plan import Tile

if TYPE_CHECKING:
    from attn_compiler.lowerings.triton_launch import Backward

#: of the bias kernels, whose tiles do not depend on the lists: up to so many head dims, in half precision
_BIAS_TILES = {
    64: Tile(queries=64, keys=64, warps=4, stages=2),
    # Two stages spill: 2296 µs instead of 1659 on an H200 (B 8, H 16, S 2048, D 128).
    128: Tile(queries=64, keys=64, warps=4, stages=1),
}
_BIAS_TILE_SMALL = Tile(queries=32, keys=32, warps=4, stages=1)
_DISTANCES_BLOCK = 128


def _bias_tile(prepared: Prepared) -> Tile:
    constants = prepared.constants
    width = max(constants["QK_0"] + constants["QK_1"], constants["V_0"] + constants["V_1"])
    if prepared.call.spec.dtype == "float32":
        return _BIAS_TILE_SMALL
    return next((tile for limit, tile in _BIAS_TILES.items() if width <= limit), _BIAS_TILE_SMALL)


def _for_bias(shared: Backward) -> tuple[dict[str, Any], Tile]:
    """Numbers and the tile of both kernels of biases' gradients."""
    numbers = shared.numbers()
    tile = _bias_tile(shared.prepared)
    del numbers["PLAIN"], numbers["MASK_ALL"]
    plan = shared.prepared.plan
    numbers["SPARSE"] = plan.band is not None or plan.tiles or plan.unlisted
    batch = shared.tensors["Q"].shape[0]
    return numbers | {"batch_size": batch, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys}, tile


def grad_bias(shared: Backward) -> torch.Tensor:
    make = functools.partial(empty_gradient, shared.tensors["bias"])
    shared.tensors["GradBias"] = shared.same.empty("GradBias", make)
    shared.launch(bias_backward.attention_grad_bias, _bias)
    return shared.tensors["GradBias"]


def _bias(shared: Backward) -> Arguments:
    numbers, tile = _for_bias(shared)
    bias, grad = shared.tensors["bias"], shared.tensors["GradBias"]
    ones = [size == 1 for size in bias.shape]
    numbers |= {f"grad_{axis}": grad.stride(dim) for dim, axis in enumerate("bhqk")}
    numbers |= {f"ONE_{axis}": one for axis, one in zip("BHQK", ones, strict=True)}
    blocks_q = 1 if ones[2] else triton.cdiv(numbers["seqlen_q"], tile.queries)
    blocks_k = 1 if ones[3] else triton.cdiv(numbers["seqlen_kv"], tile.keys)
    return Arguments(
        grid=(blocks_q * blocks_k, bias.shape[1], bias.shape[0]),
        tensors={**shared.parameters(), "Grad": "GradBias"},
        numbers=numbers,
        tile=tile,
    )


def grad_distances(shared: Backward) -> torch.Tensor:
    """Tiles summed along the diagonals of the scores, then each along its own: d = (key block - query block) · size + j - i.

    All of it goes to the first of the copies that the operand holds of the numbers.
    """
    distances = shared.tensors["distances"]
    seqlen_q, seqlen_kv = shared.tensors["Q"].shape[2], shared.tensors["K"].shape[2]
    size, heads = _bias_tile(shared.prepared).queries, distances.shape[0]
    blocks_q, blocks_k = triton.cdiv(seqlen_q, size), triton.cdiv(seqlen_kv, size)
    if blocks_q == 0 or blocks_k == 0:
        return torch.zeros_like(distances)
    diagonals = blocks_q + blocks_k - 1
    make = functools.partial(torch.empty, (heads, diagonals, size, size), dtype=torch.float32, device=distances.device)
    shared.tensors["Diagonals"] = shared.same.empty("Diagonals", make)
    shared.launch(bias_backward.attention_grad_distances, _distances)
    shared.tensors["GradDistances"] = shared.same.empty("GradDistances", functools.partial(empty_gradient, distances))
    # Column 0 is distance -(nQ - 1) · size - (size - 1).
    first = blocks_q * size - seqlen_q
    shared.launch(sums_backward.attention_sum_diagonals, functools.partial(_sum_diagonals, first=first))
    return shared.tensors["GradDistances"]


def _distances(shared: Backward) -> Arguments:
    numbers, tile = _for_bias(shared)
    sums = shared.tensors["Diagonals"]
    heads, diagonals = sums.shape[:2]
    one = heads == 1 and numbers["heads_q"] > 1
    return Arguments(
        grid=(diagonals, heads, 1),
        tensors={**shared.parameters(), "Grad": "Diagonals"},
        numbers=numbers | {"grad_h": sums.stride(0), "ONE_H": one},
        tile=tile,
    )


def _sum_diagonals(shared: Backward, first: int) -> Arguments:
    sums, grad = shared.tensors["Diagonals"], shared.tensors["GradDistances"]
    heads, phases, size = grad.shape
    numbers = {
        "grad_h": grad.stride(0),
        "grad_phase": grad.stride(1),
        "grad_size": size,
        "diagonals": sums.shape[1],
        "first": first,
        "count": shared.tensors["Q"].shape[2] + shared.tensors["K"].shape[2] - 1,
        "SIZE": sums.shape[2],
        "PHASES": phases,
        "BLOCK": _DISTANCES_BLOCK,
    }
    grid = (triton.cdiv(size, _DISTANCES_BLOCK), heads, 1)
    return Arguments(grid=grid, tensors={"Sums": "Diagonals", "Grad": "GradDistances"}, numbers=numbers)


def grad_sinks(shared: Backward) -> torch.Tensor:
    sinks = shared.tensors["sinks"]
    shared.tensors["GradSinks"] = shared.same.empty("GradSinks", functools.partial(empty_gradient, sinks))
    shared.launch(sums_backward.attention_grad_sinks, _sinks)
    return shared.tensors["GradSinks"]


def _sinks(shared: Backward) -> Arguments:
    batch, heads, _, rows = shared.tensors["RowStats"].shape
    numbers = {"batch_size": batch, "heads_q": heads, "stats_rows": rows, "BLOCK": STATS_BLOCK}
    tensors = {"RowStats": "RowStats", "Sinks": "sinks", "Grad": "GradSinks"}
    return Arguments(grid=(heads, 1, 1), tensors=tensors, numbers=numbers)
