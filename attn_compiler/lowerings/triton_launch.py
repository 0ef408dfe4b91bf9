"""Calls the Triton kernels on tensors: grids, outputs, launches. Imports triton, so it comes late.

A kernel is compiled for what its Plan has and for the tensors' alignment, never for their sizes: one compiled kernel serves
every sequence length. triton's own launch goes over some eighty arguments in Python each time; a call whose tensors lie as
those of an earlier one did reuses that one's arguments.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attn_compiler.lowerings.kernels import backward, bias_backward
from attn_compiler.lowerings.kernels import forward as forward_kernels
from attn_compiler.lowerings.ops import empty_gradient, empty_outputs
from attn_compiler.lowerings.triton_arguments import (
    VECTOR,
    Prepared,
    Tensors,
    alignment,
    common,
    lists,
    operand_tensors,
    prepare,
    strides,
)
from attn_compiler.lowerings.triton_plan import Tile

#: of the bias kernels, whose tiles do not depend on the lists: up to so many head dims, in half precision
_BIAS_TILES = {
    64: Tile(queries=64, keys=64, warps=4, stages=2),
    # Two stages spill: 2296 µs instead of 1659 on an H200 (B 8, H 16, S 2048, D 128).
    128: Tile(queries=64, keys=64, warps=4, stages=1),
}
_BIAS_TILE_SMALL = Tile(queries=32, keys=32, warps=4, stages=1)
_DELTA_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A compiled kernel and its arguments, all but the tensors. where: position and name of each tensor."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    where: tuple[tuple[int, str], ...]


_READY: dict[Any, _Ready] = {}
_MOST_READY = 4096


def _key(kernel: Any, text: str, tensors: Mapping[str, torch.Tensor | None]) -> tuple[Any, ...]:
    """Whatever a kernel's arguments but the addresses follow from."""
    shapes = [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % VECTOR) for t in tensors.values()]
    return (kernel, text, tensors["Q" if "Q" in tensors else "Out"].device, *shapes)  # type: ignore[union-attr]


def _launch(
    kernel: Any,
    text: str,
    tensors: Mapping[str, torch.Tensor | None],
    arguments: Callable[[], tuple[tuple[int, int, int], dict[str, Any], Tile | None]],
) -> None:
    """Run a kernel. arguments: gives its grid, what it takes besides the tensors, and its tile; asked for a first time only."""
    key = _key(kernel, text, tensors)
    ready = _READY.get(key)
    if ready is None:
        grid, others, tile = arguments()
        if 0 in grid:
            return
        options = {} if tile is None else {"num_warps": tile.warps, "num_stages": tile.stages}
        compiled = kernel[grid](**tensors, **others, **options)
        if compiled is not None:  # The interpreter compiles nothing.
            _remember(key, kernel, grid, compiled, tensors, others)
        return
    values = list(ready.arguments)
    for position, name in ready.where:
        values[position] = tensors[name]
    ready.compiled[ready.grid](*values)


def _remember(
    key: tuple[Any, ...],
    kernel: Any,
    grid: tuple[int, int, int],
    compiled: Any,
    tensors: Mapping[str, torch.Tensor | None],
    others: Mapping[str, Any],
) -> None:
    if len(_READY) >= _MOST_READY:
        _READY.clear()
    names = kernel.arg_names
    where = tuple((i, name) for i, name in enumerate(names) if tensors.get(name) is not None)
    _READY[key] = _Ready(compiled=compiled, grid=grid, arguments=tuple(others.get(name) for name in names), where=where)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, as `ops.LEAF_SCHEMA` says."""
    prepared = prepare(text)
    q, k, v = map(_readable, (q, k, v))
    out, lse = empty_outputs(q, v)
    have = prepared.named(operands)
    tensors = {"Q": q, "K": k, "V": v, "Out": out, "Lse": lse, "Tiles": have.get("tiles"), "Sinks": have.get("sinks")}
    tile = prepared.call.tiles.forward

    def arguments() -> tuple[tuple[int, int, int], dict[str, Any], Tile]:
        grid = (triton.cdiv(q.shape[2], tile.queries), q.shape[1], q.shape[0])
        numbers = {**common(prepared, q, k, v, operands), **lists(have.get("tiles")), **strides("o", out)}
        return grid, numbers | {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys}, tile

    with on(q.device):
        _launch(forward_kernels.attention_forward, text, tensors | operand_tensors(have), arguments)
    return out, lse


@dataclass(frozen=True, kw_only=True)
class _Backward:
    """What the kernels of one backward share. tensors: by the names of their parameters."""

    text: str
    prepared: Prepared
    have: Mapping[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor | None]
    operands: Tensors

    def numbers(self) -> dict[str, Any]:
        q, k, v, grad_out = (self.tensor(name) for name in ("Q", "K", "V", "GradOut"))
        shared = common(self.prepared, q, k, v, self.operands) | strides("g", grad_out)
        return shared | {"ALIGN": alignment(q, k, v, grad_out)}

    def tensor(self, name: str) -> torch.Tensor:
        found = self.tensors[name]
        if found is None:
            raise KeyError(name)
        return found


def gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    text: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Gradients of q, k, v and of the plan's differentiable operands, as `ops.BACKWARD_SCHEMA` says."""
    q, k, v = map(_readable, (q, k, v))
    grad_out = _readable(grad_out if grad_out.stride(3) == 1 else grad_out.contiguous())
    with on(q.device):
        return _all_gradients(_backward(grad_out, grad_lse, q, k, v, operands, out, lse, text))


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it if it begins between two vectors, in half precision: what Triton 3.6 compiles for those reads the wrong
    elements, or beyond the tensor, where a head dim takes two tiles.

    The one copy outside of the graph. The layout pass sees to strides; where a tensor begins in its memory none of them says, and
    a slice at an odd element is rare.
    """
    if not x.is_cuda or x.element_size() >= 4 or alignment(x) > 1:
        return x
    copied = x.clone(memory_format=torch.contiguous_format)
    if alignment(copied) == 1:
        raise ValueError(
            f"the Triton kernels take head dims that are multiples of 8 in half precision, got {x.shape[3]}"
        )
    return copied


def single_gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    text: str,
) -> dict[str, Callable[[], None]]:
    """Arguments as those of `gradients`: for each kernel that has a tile in `Tiles`, a call that runs it alone, to be measured.

    They launch on the current device, which has to be the tensors', and read q, k, v and grad_out as they are.
    """
    shared = _backward(grad_out, grad_lse, q, k, v, operands, out, lse, text)
    grad_q, grad_k, grad_v = empty_gradient(q), empty_gradient(k), empty_gradient(v)
    return {
        "grad_q": functools.partial(_grad_q, shared, grad_q),
        "grad_kv": functools.partial(_grad_kv, shared, grad_k, grad_v),
    }


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the tensors are on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _all_gradients(shared: _Backward) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    grad_q, grad_k, grad_v = (empty_gradient(shared.tensor(name)) for name in "QKV")
    _grad_q(shared, grad_q)
    _grad_kv(shared, grad_k, grad_v)
    further = {"bias": _grad_bias, "distances": _grad_distances, "sinks": _grad_sinks}
    return grad_q, grad_k, grad_v, [further[name](shared) for name in shared.prepared.plan.differentiable]


def _backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    text: str,
) -> _Backward:
    prepared = prepare(text)
    have = prepared.named(operands)
    delta = _delta(text, grad_out, grad_lse.contiguous(), out)
    tensors = {"Q": q, "K": k, "V": v, "GradOut": grad_out, "Lse": lse, "Delta": delta} | operand_tensors(have)
    return _Backward(text=text, prepared=prepared, have=have, tensors=tensors, operands=operands)


def _delta(text: str, grad_out: torch.Tensor, grad_lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    batch, heads, seqlen_q, head_dim = out.shape
    delta = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=out.device)
    tensors = {"Out": out, "GradOut": grad_out, "GradLse": grad_lse, "Delta": delta}

    def arguments() -> tuple[tuple[int, int, int], dict[str, Any], None]:
        numbers = {**strides("o", out), **strides("g", grad_out), "heads_q": heads, "seqlen_q": seqlen_q}
        numbers |= {"BLOCK_M": _DELTA_ROWS, "HEAD_DIM_V": head_dim, "ALIGN": alignment(out, grad_out)}
        numbers["V_ALL"] = max(16, triton.next_power_of_2(head_dim))
        return (triton.cdiv(seqlen_q, _DELTA_ROWS), heads, batch), numbers, None

    _launch(backward.attention_delta, text, tensors, arguments)
    return delta


def _grad_q(shared: _Backward, grad_q: torch.Tensor) -> None:
    tile = shared.prepared.call.tiles.grad_q
    tiles = shared.have.get("tiles")

    def arguments() -> tuple[tuple[int, int, int], dict[str, Any], Tile]:
        numbers = {**shared.numbers(), **lists(tiles), **strides("dq", grad_q)}
        grid = (triton.cdiv(grad_q.shape[2], tile.queries), grad_q.shape[1], grad_q.shape[0])
        return grid, numbers | {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys}, tile

    tensors = {**shared.tensors, "GradQ": grad_q, "Tiles": tiles}
    _launch(backward.attention_grad_q, shared.text, tensors, arguments)


def _grad_kv(shared: _Backward, grad_k: torch.Tensor, grad_v: torch.Tensor) -> None:
    tile = shared.prepared.call.tiles.grad_kv
    tiles = shared.have.get("tiles_by_key")

    def arguments() -> tuple[tuple[int, int, int], dict[str, Any], Tile]:
        numbers = {**shared.numbers(), **lists(tiles), **strides("dk", grad_k), **strides("dv", grad_v)}
        grid = (triton.cdiv(grad_k.shape[2], tile.keys), grad_k.shape[1], grad_k.shape[0])
        return grid, numbers | {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys}, tile

    tensors = {**shared.tensors, "GradK": grad_k, "GradV": grad_v, "Tiles": tiles}
    _launch(backward.attention_grad_kv, shared.text, tensors, arguments)


def _bias_tile(prepared: Prepared) -> Tile:
    constants = prepared.constants
    width = max(constants["QK_0"] + constants["QK_1"], constants["V_0"] + constants["V_1"])
    if prepared.call.spec.dtype == "float32":
        return _BIAS_TILE_SMALL
    return next((tile for limit, tile in _BIAS_TILES.items() if width <= limit), _BIAS_TILE_SMALL)


def _for_bias(shared: _Backward) -> tuple[dict[str, Any], Tile]:
    """Numbers and the tile of both kernels of biases' gradients."""
    numbers = shared.numbers()
    tile = _bias_tile(shared.prepared)
    del numbers["PLAIN"], numbers["MASK_ALL"]
    plan = shared.prepared.plan
    numbers["SPARSE"] = plan.band is not None or plan.tiles or plan.unlisted
    batch = shared.tensor("Q").shape[0]
    return numbers | {"batch_size": batch, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys}, tile


def _grad_bias(shared: _Backward) -> torch.Tensor:
    bias = shared.have["bias"]
    grad = empty_gradient(bias)

    def arguments() -> tuple[tuple[int, int, int], dict[str, Any], Tile]:
        numbers, tile = _for_bias(shared)
        ones = [size == 1 for size in bias.shape]
        numbers |= {f"grad_{axis}": grad.stride(dim) for dim, axis in enumerate("bhqk")}
        numbers |= {f"ONE_{axis}": one for axis, one in zip("BHQK", ones, strict=True)}
        blocks_q = 1 if ones[2] else triton.cdiv(numbers["seqlen_q"], tile.queries)
        blocks_k = 1 if ones[3] else triton.cdiv(numbers["seqlen_kv"], tile.keys)
        return (blocks_q * blocks_k, bias.shape[1], bias.shape[0]), numbers, tile

    _launch(bias_backward.attention_grad_bias, shared.text, {**shared.tensors, "Grad": grad}, arguments)
    return grad


def _grad_distances(shared: _Backward) -> torch.Tensor:
    """Tiles summed along the diagonals of the scores, then each along its own: d = (key block - query block) · size + j - i.

    All of it goes to the first of the copies that the operand holds of the numbers.
    """
    distances = shared.have["distances"]
    numbers, tile = _for_bias(shared)
    size, heads = tile.queries, distances.shape[0]
    blocks_q, blocks_k = (triton.cdiv(numbers[n], size) for n in ("seqlen_q", "seqlen_kv"))
    if blocks_q == 0 or blocks_k == 0:
        return torch.zeros_like(distances)
    diagonals = blocks_q + blocks_k - 1
    sums = torch.zeros((heads, diagonals, size, size), dtype=torch.float32, device=distances.device)

    def arguments() -> tuple[tuple[int, int, int], dict[str, Any], Tile]:
        one = heads == 1 and numbers["heads_q"] > 1
        return (diagonals, heads, 1), numbers | {"grad_h": sums.stride(0), "ONE_H": one}, tile

    _launch(bias_backward.attention_grad_distances, shared.text, {**shared.tensors, "Grad": sums}, arguments)
    # Row i of a tile, moved right by size - 1 - i, has distance j - i in column j - i + size - 1: shear by padding rows.
    pad = torch.nn.functional.pad
    sheared = pad(sums.flip(-2), (0, size)).reshape(heads, diagonals, 2 * size * size)
    by_column = sheared[..., : (2 * size - 1) * size].reshape(heads, diagonals, size, 2 * size - 1).sum(-2)
    halves = pad(by_column, (0, 1)).reshape(heads, diagonals, 2, size)
    total = pad(halves[:, :, 0], (0, 0, 0, 1)) + pad(halves[:, :, 1], (0, 0, 1, 0))
    # Column 0 is distance -(nQ - 1) · size - (size - 1).
    first = blocks_q * size - numbers["seqlen_q"]
    count = numbers["seqlen_q"] + numbers["seqlen_kv"] - 1
    grad = torch.zeros_like(distances)
    grad[:, 0, :count] = total.reshape(heads, -1)[:, first : first + count]
    return grad


def _grad_sinks(shared: _Backward) -> torch.Tensor:
    """A sink's weight takes from its row and adds to the lse: weight · (grad_lse - sum(out · grad_out)) = -weight · delta."""
    sinks, lse, delta = shared.have["sinks"], shared.tensor("Lse"), shared.tensor("Delta")
    weights = torch.exp(sinks.float()[None, :, None] - lse)
    return empty_gradient(sinks).copy_(-(weights * delta).sum((0, 2)))
