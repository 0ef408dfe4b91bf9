"""Launches after a kernel for queries without keys, where `spec.mask.means` asks for it. Imports triton, so it is imported late."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared.calls.arguments import Named, Prepared, strides
from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.kernels import keyless_rows as kernels
from attn_compiler.lowerings.shared.launching.launch import Arguments, ReadyKernel, launch
from attn_compiler.lowerings.shared.launching.replaying import CallCache

#: partial sums of a head
_CHUNKS = 8
#: rows whose lse is read at once
_SCAN = 1024
#: elements of a tile of v or of products, so that several fit into shared memory of 99 KiB
_MOST_OF_TILE = 8192


def fill(prepared: Prepared, same: CallCache, tensors: Named) -> list[ReadyKernel | None]:
    """Fill rows of Out whose lse is -inf. Returns the results of `launch`: none beside a bias, where the kernel itself gives the mean."""
    if prepared.plan.bias:
        return []
    v = tensors["V"]
    tensors["ValueSums"] = same.empty("ValueSums", functools.partial(_room, v, _width(v.shape[3])))

    def started(kernel: Any, arguments: Any) -> ReadyKernel | None:
        return launch(kernel, same, tensors, lambda: arguments(tensors))

    return [started(kernels.attention_sum_values, _sum_values), started(kernels.attention_fill_rows, _fill_rows)]


def add_gradients(shared: Backward) -> None:
    """Add the gradients through rows without keys to GradQ, GradK and GradV."""
    tensors, same = shared.tensors, shared.same
    width, side = _width(tensors["V"].shape[3]), _side(tensors["V"])
    parts = triton.cdiv(tensors["K"].shape[3], side)
    rooms = {
        "RowsFound": (torch.int32, ()),
        "RowSums": (torch.float32, (width,)),
        "RowProducts": (torch.float32, (parts, width, side)),
        "KeySums": (torch.float32, (width,)),
        "KeyProducts": (torch.float32, (parts, width + 1, side)),
    }
    for name, (dtype, shape) in rooms.items():
        tensors[name] = same.empty(name, functools.partial(_room, tensors["V"], *shape, dtype=dtype))
    shared.launch(kernels.attention_sum_rows, _sum_rows)
    shared.launch(kernels.attention_sum_keys, _sum_keys)
    shared.launch(kernels.attention_rows_grad_q, _grad_q)
    shared.launch(kernels.attention_rows_grad_kv, _grad_kv)


def _width(head_dim: int) -> int:
    return 1 << max(4, (head_dim - 1).bit_length())


def _room(v: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty((v.shape[0], v.shape[1], _CHUNKS, *shape), dtype=dtype, device=v.device)


def _side(v: torch.Tensor) -> int:
    """Return the rows of a tile, and the columns of q and k in one product."""
    return max(16, min(64, _MOST_OF_TILE // _width(v.shape[3])))


def _of_v(tensors: Named) -> dict[str, Any]:
    q, v = tensors["Q"], tensors["V"]
    numbers = {"group": q.shape[1] // v.shape[1], "seqlen_q": q.shape[2], "seqlen_kv": v.shape[2]}
    return numbers | {"BLOCK": _side(v), "CHUNKS": _CHUNKS, "HEAD_DIM_V": v.shape[3], "V_ALL": _width(v.shape[3])}


def _of_both(shared: Backward) -> dict[str, Any]:
    head_dim, side = shared.tensors["K"].shape[3], _side(shared.tensors["V"])
    parts = {"HEAD_DIM_QK": head_dim, "PART": side, "PARTS": triton.cdiv(head_dim, side)}
    marked = {"MARKED": shared.prepared.plan.bias}
    return _of_v(shared.tensors) | parts | marked | {"scale": shared.prepared.call.spec.score.scale}


def _arguments(
    grid: tuple[int, int, int], tensors: dict[str, str | None], numbers: dict[str, Any], kernel: Any, warps: int = 8
) -> Arguments:
    wanted = {name: value for name, value in {"MARKED": False, **numbers}.items() if name in kernel.arg_names}
    return Arguments(grid=grid, tensors=tensors, numbers=wanted, tile=Tile(queries=0, keys=0, warps=warps, stages=1))


def _sum_values(tensors: Named) -> Arguments:
    v = tensors["V"]
    numbers = _of_v(tensors) | strides("v", v) | {"SCAN": _SCAN}
    names: dict[str, str | None] = {"V": "V", "Lse": "Lse", "Sums": "ValueSums"}
    grid = (_CHUNKS, v.shape[1], v.shape[0])
    return _arguments(grid, names, numbers, kernels.attention_sum_values, 4)


def _fill_rows(tensors: Named) -> Arguments:
    out = tensors["Out"]
    names: dict[str, str | None] = {"Out": "Out", "Lse": "Lse", "Sums": "ValueSums"}
    numbers = _of_v(tensors) | strides("o", out)
    return _arguments(_by_rows(out, tensors), names, numbers, kernels.attention_fill_rows, 4)


def _by_rows(x: torch.Tensor, tensors: Named) -> tuple[int, int, int]:
    return (triton.cdiv(x.shape[2], _side(tensors["V"])), x.shape[1], x.shape[0])


def _by_parts(shared: Backward) -> tuple[int, int, int]:
    k = shared.tensors["K"]
    return (_CHUNKS, k.shape[1] * triton.cdiv(k.shape[3], _side(shared.tensors["V"])), k.shape[0])


def _sum_rows(shared: Backward) -> Arguments:
    names: dict[str, str | None] = {name: name for name in ("Q", "GradOut", "Lse")}
    names |= {"Found": "RowsFound", "Sums": "RowSums", "Products": "RowProducts"}
    numbers = _of_both(shared) | strides("q", shared.tensors["Q"]) | strides("g", shared.tensors["GradOut"])
    return _arguments(_by_parts(shared), names, numbers | {"SCAN": _SCAN}, kernels.attention_sum_rows)


def _sum_keys(shared: Backward) -> Arguments:
    tensors = shared.tensors
    names: dict[str, str | None] = {"K": "K", "V": "V", "Found": "RowsFound", "Sums": "KeySums"}
    names["Products"] = "KeyProducts"
    numbers = _of_both(shared) | strides("k", tensors["K"]) | strides("v", tensors["V"])
    return _arguments(_by_parts(shared), names, numbers, kernels.attention_sum_keys)


def _grad_q(shared: Backward) -> Arguments:
    tensors = shared.tensors
    names: dict[str, str | None] = {name: name for name in ("GradOut", "GradQ", "Lse")}
    names |= {"Sums": "KeySums", "Products": "KeyProducts"}
    numbers = _of_both(shared) | strides("g", tensors["GradOut"]) | strides("dq", tensors["GradQ"])
    grid = _by_rows(tensors["GradQ"], tensors)
    return _arguments(grid, names, numbers, kernels.attention_rows_grad_q)


def _grad_kv(shared: Backward) -> Arguments:
    tensors = shared.tensors
    names: dict[str, str | None] = {name: name for name in ("V", "GradK", "GradV", "RowProducts")}
    names |= {"Found": "RowsFound", "OfRows": "RowSums", "OfKeys": "KeySums"}
    numbers = {
        **_of_both(shared),
        **strides("v", tensors["V"]),
        **strides("dk", tensors["GradK"]),
        **strides("dv", tensors["GradV"]),
    }
    grid = _by_rows(tensors["GradK"], tensors)
    return _arguments(grid, names, numbers, kernels.attention_rows_grad_kv)
