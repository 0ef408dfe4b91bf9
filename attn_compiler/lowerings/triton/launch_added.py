"""Gradients of learned biases and of biases by distance. Imports triton, so it is imported late."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared.calls.arguments import Prepared, lists, strides
from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.kernels import sums_backward
from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_gradient
from attn_compiler.lowerings.shared.parts.kernel_plan import MOST_BLOCKS
from attn_compiler.lowerings.triton.kernels import bias_backward, kept_backward

#: tiles of the bias kernels, which do not depend on the lists, by the most head dims, in half precision
_BIAS_TILES = {
    64: Tile(queries=64, keys=64, warps=4, stages=2),
    # Two stages spill: 2296 µs instead of 1659 on an H200 (B 8, H 16, S 2048, D 128).
    128: Tile(queries=64, keys=64, warps=4, stages=1),
}
_BIAS_TILE_SMALL = Tile(queries=32, keys=32, warps=4, stages=1)
_DISTANCES_BLOCK = 128
#: Fewest queries of a group of programs of dq's launch. Fewer make more sums by distance; with more, less stays in the L2 cache: H200,
#: B 8, S 2048, D 64, dq and a table's gradient with 128 / 256 / 512: 866 / 944 / 1045 µs, dq and a bias' 64 / 128 / 256: 915 / 905 / 886.
_SPAN = 128


def _bias_tile(prepared: Prepared) -> Tile:
    constants = prepared.constants
    width = max(constants["QK_0"] + constants["QK_1"], constants["V_0"] + constants["V_1"])
    if prepared.call.spec.dtype == "float32":
        return _BIAS_TILE_SMALL
    return next((tile for limit, tile in _BIAS_TILES.items() if width <= limit), _BIAS_TILE_SMALL)


def _for_bias(shared: Backward) -> tuple[dict[str, Any], Tile]:
    """Return numbers and the tile of both kernels of biases' gradients."""
    numbers = shared.numbers() | shared.pitch
    tile = _bias_tile(shared.prepared)
    # These kernels always apply the whole mask and the scale, so one compiled kernel serves every plan.
    numbers |= {"PLAIN": False, "MASK_ALL": False}
    plan = shared.prepared.plan
    numbers["SPARSE"] = plan.band is not None or plan.tiles or plan.unlisted
    batch = shared.tensors["Q"].shape[0]
    return numbers | {"batch_size": batch, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys}, tile


def add_further(shared: Backward) -> None:
    """Allocate the further outputs of dq's launch from kept scores: the gradient of a bias with both axes, or else sums by distance."""
    plan, bias = shared.prepared.plan, shared.tensors.get("bias")
    if plan.bias_grad and bias is not None and 1 not in bias.shape[2:]:
        shared.tensors["GradBias"] = shared.same.empty("GradBias", functools.partial(empty_gradient, bias))
    elif plan.distances_grad:
        _add_sums(shared, _span(shared))


def _span(shared: Backward) -> int:
    """Return the queries of a group of programs of dq's launch with further outputs: whole tiles of both."""
    return max(_SPAN, _bias_tile(shared.prepared).queries, shared.prepared.call.tiles.grad_q.queries)


def _add_sums(shared: Backward, span: int | None) -> None:
    """Allocate Sums: float32 (Hq|1, spans, diagonals of one, 2, size of a tile). span: queries of one; None: all."""
    q, k, distances = (shared.tensors[name] for name in ("Q", "K", "distances"))
    size = _bias_tile(shared.prepared).queries
    blocks_q, blocks_k = (triton.cdiv(x.shape[2], size) for x in (q, k))
    spans, blocks = (1, blocks_q) if span is None else (triton.cdiv(q.shape[2], span), span // size)
    shape = (distances.shape[0], spans, blocks_k + blocks - 1, 2, size)
    make = functools.partial(torch.empty, shape, dtype=torch.float32, device=q.device)
    shared.tensors["Sums"] = shared.same.empty("Sums", make)


def launch_grad_q_kept(shared: Backward) -> None:
    """Launch dq from kept scores, with the outputs of `add_further`."""
    shared.launch(kept_backward.attention_grad_q_kept, _grad_q_kept)


def _grad_q_kept(shared: Backward) -> Arguments:
    tile, kernel = shared.prepared.call.tiles.grad_q, kept_backward.attention_grad_q_kept
    q, grad, sums = shared.tensors["Q"], shared.tensors.get("GradBias"), shared.tensors.get("Sums")
    numbers, bias_tile = _for_bias(shared)
    size, heads, batch = bias_tile.queries, 1, 1
    span, blocks_k, others = tile.queries, triton.cdiv(numbers["seqlen_kv"], size), 0
    if grad is not None:
        span, (batch, heads) = _span(shared), grad.shape[:2]
        others = blocks_k * (span // size)
    elif sums is not None:
        heads, span, others = sums.shape[0], _span(shared), sums.shape[2]
    numbers |= {f"grad_{axis}": 0 if grad is None else grad.stride(dim) for dim, axis in enumerate("bhqk")}
    numbers |= {**lists(shared.tensors.get("tiles")), **strides("dq", shared.tensors["GradQ"])}
    numbers |= {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "MASK_ALL": shared.prepared.plan.unlisted}
    numbers |= {"ONE_B": batch == 1, "ONE_H": heads == 1, "SPAN": span, "SIZE": min(size, span)}
    # The other kernels' further arguments are contained in the scores' gradients.
    for unread in ("stride_q", "stride_v", "stride_g", "stats_rows", "adding"):
        del numbers[unread]
    of_dq = span // tile.queries * (q.shape[0] if batch == 1 else 1) * (q.shape[1] if heads == 1 else 1)
    further = {"Grad": "GradBias" if grad is not None else None, "Sums": "Sums" if sums is not None else None}
    names = {**shared.parameters("GradQ"), **shared.scores, **further, "Tiles": shared.prepared.present("tiles")}
    return Arguments(
        grid=(triton.cdiv(q.shape[2], span) * (of_dq + others), heads, batch),
        tensors={name: names[name] for name in kernel.arg_names if name in names},
        numbers=numbers,
        tile=tile,
    )


def grad_bias(shared: Backward) -> torch.Tensor:
    if "GradBias" not in shared.tensors:
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
    all_q, all_k = triton.cdiv(numbers["seqlen_q"], tile.queries), triton.cdiv(numbers["seqlen_kv"], tile.keys)
    everything = (numbers["batch_size"], numbers["heads_q"], all_q, all_k)
    _check_summed(math.prod(size for size, one in zip(everything, ones, strict=True) if one))
    blocks_q, blocks_k = 1 if ones[2] else all_q, 1 if ones[3] else all_k
    return Arguments(
        grid=(blocks_q * blocks_k, bias.shape[1], bias.shape[0]),
        tensors={**shared.parameters(), **shared.scores, "Grad": "GradBias"},
        numbers=numbers,
        tile=tile,
    )


def grad_distances(shared: Backward) -> torch.Tensor:
    """Sum tiles along the diagonals of the scores, then each along its own: by dq's launch, or one of their own.

    The result goes to the first of the operand's copies of the biases.
    """
    distances = shared.tensors["distances"]
    if shared.tensors["Q"].shape[2] == 0 or shared.tensors["K"].shape[2] == 0:
        return torch.zeros_like(distances)
    if "Sums" in shared.tensors:
        span = _span(shared)
    else:
        _add_sums(shared, None)
        shared.launch(bias_backward.attention_grad_distances, _distances)
        span = shared.tensors["Q"].shape[2]
    shared.tensors["GradDistances"] = shared.same.empty("GradDistances", functools.partial(empty_gradient, distances))
    shared.launch(sums_backward.attention_sum_diagonals, functools.partial(_sum_diagonals, span=span))
    return shared.tensors["GradDistances"]


def _check_summed(tiles: int) -> None:
    """Raise ValueError for more tiles of scores than a program's loop counts. They would take an hour."""
    if tiles > MOST_BLOCKS:
        raise ValueError(f"a learned bias' gradient sums at most {MOST_BLOCKS} tiles of scores into one, got {tiles}")


def _distances(shared: Backward) -> Arguments:
    numbers, tile = _for_bias(shared)
    heads, _, diagonals = shared.tensors["Sums"].shape[:3]
    _check_summed(numbers["batch_size"] * numbers["heads_q"] // heads * diagonals)
    return Arguments(
        grid=(diagonals, heads, 1),
        tensors={**shared.parameters(), **shared.scores, "Sums": "Sums"},
        numbers=numbers | {"ONE_H": heads == 1 and numbers["heads_q"] > 1},
        tile=tile,
    )


def _sum_diagonals(shared: Backward, span: int) -> Arguments:
    sums, grad = shared.tensors["Sums"], shared.tensors["GradDistances"]
    heads, phases, size = grad.shape
    seqlen_q, seqlen_kv = shared.tensors["Q"].shape[2], shared.tensors["K"].shape[2]
    numbers = {
        "grad_h": grad.stride(0),
        "grad_phase": grad.stride(1),
        "grad_size": size,
        "spans": sums.shape[1],
        "diagonals": sums.shape[2],
        "span_blocks": triton.cdiv(span, sums.shape[4]),
        "seqlen_q": seqlen_q,
        "count": seqlen_q + seqlen_kv - 1,
        "SIZE": sums.shape[4],
        "PHASES": phases,
        "BLOCK": _DISTANCES_BLOCK,
    }
    grid = (triton.cdiv(size, _DISTANCES_BLOCK), heads, 1)
    return Arguments(grid=grid, tensors={"Sums": "Sums", "Grad": "GradDistances"}, numbers=numbers)
