"""Launches of gradient kernels for any mask and score change: of q, of k and v, and of sinks. Imports triton, so it is imported late."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import triton

from attn_compiler.lowerings.shared.calls.arguments import STATS_BLOCK, Prepared, along, lists, strides
from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.launching.launch import Arguments, Grid
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_gradient
from attn_compiler.torch_private.symbols import statically_known

_NARROW = 64


def heads_last(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether programs of all batch rows precede those of the next head. Batch rows that share a bias then read it from memory once,
    and from the L2 cache afterwards. Only with narrow heads: wider ones have another bottleneck
    (H200, B 8, S 2048, D 64 / 128: forward 922 to 849 µs / 746 to 757)."""
    bias, q, v = tensors.get("bias"), tensors["Q"], tensors["V"]
    shared = bias is not None and statically_known(along(bias, 0) == 0) and not statically_known(along(bias, 1) == 0)
    several = not statically_known(q.shape[0] == 1)
    return shared and several and max(q.shape[3], v.shape[3]) <= _NARROW


def grid(blocks: int, heads: int, batch: int, last: bool) -> Grid:
    """Return the grid. last: programs of all batch rows precede those of the next head."""
    return (blocks, batch, heads) if last else (blocks, heads, batch)


def rounded_to(prepared: Prepared) -> int:
    """Return the largest block of queries of all passes, each of which is a power of two."""
    tiles = prepared.call.tiles
    return max(STATS_BLOCK, tiles.grad_q.queries, tiles.grad_kv.queries)


def grad_q(shared: Backward) -> Arguments:
    """Return the arguments of the kernel for the gradient of q, which also writes the row stats for the other one."""
    tiles, grad_q, listed = shared.prepared.call.tiles, shared.tensors["GradQ"], shared.tensors.get("tiles")
    tile = tiles.grad_q
    numbers = {**shared.numbers(), **lists(listed), **strides("dq", grad_q)}
    last = heads_last(shared.tensors)
    numbers |= strides("o", shared.tensors["Out"]) | {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys}
    return Arguments(
        grid=grid(triton.cdiv(grad_q.shape[2], tile.queries), grad_q.shape[1], grad_q.shape[0], last),
        tensors={**shared.parameters("GradQ", "Out", "Lse", "GradLse"), "Tiles": shared.prepared.present("tiles")},
        numbers=numbers
        | {
            "HEADS_LAST": last,
            "ROUND": rounded_to(shared.prepared),
            "TOGETHER": 1 if listed is None else tiles.forward.queries // tile.queries,
        },
        tile=tile,
    )


def grad_kv(shared: Backward, part: str) -> Arguments:
    """Return the arguments of the kernel for the gradients of k and v. part: "k", "v" or "kv", the gradients to compute."""
    tile, grad_k, grad_v = shared.prepared.call.tiles.grad_kv, shared.tensors["GradK"], shared.tensors["GradV"]
    numbers = {**shared.numbers(), **shared.pitch, **lists(shared.tensors.get("tiles_by_key"))}
    numbers |= {**strides("dk", grad_k), **strides("dv", grad_v), "FOR_K": "k" in part, "FOR_V": "v" in part}
    last = heads_last(shared.tensors)
    return Arguments(
        grid=grid(triton.cdiv(grad_k.shape[2], tile.keys), grad_k.shape[1], grad_k.shape[0], last),
        tensors={
            **shared.parameters("GradK", "GradV"),
            **shared.scores,
            "Tiles": shared.prepared.present("tiles_by_key"),
        },
        numbers=numbers | {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "HEADS_LAST": last},
        tile=tile,
    )


def grad_sinks(shared: Backward) -> torch.Tensor:
    """Launch the kernel for the gradient of sinks, and return it: float32 (Hq,)."""
    sinks = shared.tensors["sinks"]
    shared.tensors["GradSinks"] = shared.same.empty("GradSinks", functools.partial(empty_gradient, sinks))
    from attn_compiler.lowerings.shared.kernels import sums_backward

    shared.launch(sums_backward.attention_grad_sinks, _sinks)
    return shared.tensors["GradSinks"]


def _sinks(shared: Backward) -> Arguments:
    batch, heads, _, rows = shared.tensors["RowStats"].shape
    numbers = {"batch_size": batch, "heads_q": heads, "stats_rows": rows, "BLOCK": STATS_BLOCK}
    tensors = {"RowStats": "RowStats", "Sinks": "sinks", "Grad": "GradSinks"}
    return Arguments(grid=(heads, 1, 1), tensors=tensors, numbers=numbers)
