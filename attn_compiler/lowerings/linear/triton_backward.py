"""Launches of the backward kernels of linear attention. Imports triton, so it is imported late.

The forward's results on a chunk are computed again: only operands are kept from the forward to the backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.linear import plain_calls
from attn_compiler.lowerings.linear.kernels import backward as kernels, channel_backward
from attn_compiler.lowerings.linear.triton_launch import chunks
from attn_compiler.lowerings.linear.triton_passes import passes, processors, switches
from attn_compiler.lowerings.linear.triton_sizes import empty, strides, tile, wide
from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from attn_compiler.lowerings.shared.calls.leaf_calls import or_else
from attn_compiler.lowerings.shared.launching.launch import Arguments, launch
from attn_compiler.lowerings.shared.launching.on_device import on

#: rows of a chunk in one program, where each channel has a decay
_BLOCK = 16


def backward(*given: Any) -> tuple[Tensor, ...]:
    """Compute `linear_chunks_backward`: the operands' gradients, contiguous, and empty for an absent one. By plain ops where a kernel
    can't be compiled or started."""
    launch_all, instead = functools.partial(_launched, *given), functools.partial(plain_calls.backward, *given)
    return or_else("linear_chunks_backward", given[-1], launch_all, instead)


def _launched(
    grad_out: Tensor,
    grad_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    state: Tensor | None,
    text: str,
) -> tuple[Tensor, ...]:
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "skip": skip, "first": state}
    grad_out = grad_out.contiguous()
    call = LinearTensors.of("linear_chunks_backward", given, text, grad_out, grad_last)
    operands = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "first": state}
    with on(v.device):
        grads = {
            name: torch.empty(x.shape, dtype=x.dtype, device=x.device) for name, x in operands.items() if x is not None
        }
        call.named.update({f"grad_{name}": x for name, x in grads.items()}, grad=grad_out, grad_last=grad_last)
        chunks(call)
        _states(call)
        of_skip = _chunk_gradients(call, skip)
        for name in ("q", "k"):
            _rows(call, name)
        absent = v.new_empty(0)
        return (
            *(grads[x] for x in ("q", "k", "v", "g", "beta")),
            absent if of_skip is None else of_skip,
            grads.get("first", absent),
        )


def _states(call: LinearTensors) -> None:
    """Compute the state before each chunk, and the gradient of that after it."""
    sizes, named = call.sizes, call.named
    shape = (sizes.batch, sizes.heads, sizes.chunks, sizes.dim_k, sizes.dim_v)
    values = (*shape[:3], sizes.chunk, sizes.dim_v)
    make = sizes.in_parts if call.on_hopper else empty
    # Products take states of one part as they lie in memory.
    of_states = make if sizes.parts == 1 and not call.is_delta else empty
    named.update(states=of_states(shape, named["q"]), afters=of_states(shape, named["q"]))
    if call.is_delta:
        named.update(values=make(values, named["q"]), grad_values=make(values, named["q"]))
    passes(call)


def _chunk_gradients(call: LinearTensors, skip: Tensor | None) -> Tensor | None:
    """Compute all gradients but the first state's; return that of `skip`."""
    if call.form.channel:
        _channel_gradients(call)
        return None
    sizes, named = call.sizes, call.named
    if call.on_hopper and not call.is_delta:
        return _space_gradients(call, skip)
    parts = (sizes.batch, sizes.length, sizes.heads, sizes.dim_k)
    named.update(part_q=empty(parts, named["q"]), part_k=empty(parts, named["q"]))
    if call.on_hopper:
        _hopper_gradients(call)
        return None
    if skip is not None:
        named["part_skip"] = empty((sizes.batch, sizes.heads, sizes.chunks), named["q"])
    if not call.is_delta:
        call.run(kernels.value_gradients, sizes.rows * sizes.chunks, stages=1)
    summed = ("g", "beta") if call.is_delta else ("g",)
    shares = (sizes.shares, sizes.batch, sizes.length, sizes.heads)
    for name in summed:
        named[f"part_{name}"] = named[f"grad_{name}"] if sizes.shares == 1 else empty(shares, named["q"])
    columns = sizes.fewer_columns if call.is_delta else sizes.columns
    call.run(kernels.head_gradients, sizes.rows * sizes.chunks * sizes.shares, stages=1, BV=columns)
    if sizes.shares > 1:
        for name in summed:
            named[f"grad_{name}"].copy_(named[f"part_{name}"].sum(0))
    return None if skip is None else named["part_skip"].sum((0, 2)).to(skip.dtype)


def _hopper_gradients(call: LinearTensors) -> None:
    """Compute the gradients of `_chunk_gradients` by one program for some chunks of a head, so that all processors end at once."""
    from attn_compiler.lowerings.linear.kernels.backward_sm90 import head_gradients_sm90

    sizes, named, many = call.sizes, call.named, processors(call.same.device)
    named.update(part_g=named["grad_g"], part_beta=named["grad_beta"])
    pieces = min(range(1, 9), key=lambda n: -(-sizes.rows * n // many) * -(-sizes.chunks // n))
    of_piece = max(-(-sizes.chunks // pieces), 1)
    pieces = -(-sizes.chunks // of_piece)
    call.run(head_gradients_sm90, sizes.rows * pieces, 8, HOW=switches(call), pieces=pieces, of_piece=of_piece)


def _space_gradients(call: LinearTensors, skip: Tensor | None) -> Tensor | None:
    """Compute the results of `_chunk_gradients`. A program takes a chunk of some heads that share q and k, and adds up their gradients of
    both. Its beginning and end cost as much time as two heads."""
    from attn_compiler.lowerings.linear.kernels.space_sm90 import space_gradients_sm90

    sizes, named, many = call.sizes, call.named, processors(call.same.device)
    group, programs = sizes.heads // sizes.groups, sizes.chunks * sizes.batch * sizes.groups
    cuts = [n for n in range(1, group + 1) if group % n == 0]
    pieces = sizes.groups * min(cuts, key=lambda n: -(-programs * n // many) * (group // n + 2))
    parts = (sizes.batch, sizes.length, pieces, sizes.dim_k)
    named.update(part_q=empty(parts, named["q"]), part_k=empty(parts, named["q"]))
    named.update(part_g=named["grad_g"], part_beta=named["grad_beta"])
    if skip is not None:
        named["part_skip"] = empty((sizes.batch, sizes.length, sizes.heads), named["q"])
    programs, of_piece = sizes.chunks * sizes.batch * pieces, sizes.heads // pieces
    how = switches(call, 5 if sizes.parts == 1 else 3)
    call.run(space_gradients_sm90, programs, 8, HOW=how, pieces=pieces, of_piece=of_piece)
    return None if skip is None else named["part_skip"].sum((0, 1)).to(skip.dtype)


def _channel_gradients(call: LinearTensors) -> None:
    """Compute the gradients of `_chunk_gradients` where each channel has a decay."""
    sizes, named = call.sizes, call.named
    many, q = (sizes.batch, sizes.heads, sizes.chunks), named["q"]
    rows = (sizes.batch, sizes.length, sizes.heads, sizes.dim_k)
    named.update({name: empty(rows, q) for name in ("part_q", "part_k", "part_late")})
    named.update({name: empty((*many, sizes.chunk, sizes.chunk), q) for name in ("grad_pairs", "grad_lower")})
    named.update(ends=empty((*many, wide(sizes.dim_k)), q), part_beta=empty((sizes.shares, *rows[:3]), q))
    named["spoiled"] = torch.empty(many, dtype=torch.int32, device=q.device)
    named["grad_sums"] = empty((*many, sizes.chunk, wide(sizes.dim_k)), q)
    programs = sizes.rows * sizes.chunks
    call.run(channel_backward.channel_gradients, programs * sizes.shares, stages=1, BV=sizes.fewer_columns)
    # The gradient of g is a difference of large sums: in one part it would be three times as far off.
    parts = 2 if sizes.parts == 1 else sizes.parts
    call.run(channel_backward.channel_pair_gradients, programs * (sizes.chunk // _BLOCK), PARTS=parts)
    call.run(channel_backward.decay_gradients, programs)


def _rows(call: LinearTensors, name: str) -> None:
    sizes = call.sizes
    tensors = {"x": call.named[name], "part": call.named[f"part_{name}"], "grad_x": call.named[f"grad_{name}"]}

    def arguments() -> Arguments:
        numbers = call.numbers | strides(tensors, {"x": "bsh"})
        numbers |= {
            "groups": sizes.groups,
            "PIECES": tensors["part"].shape[2] // sizes.groups,
            "scale": numbers["scale"] if name == "q" else 1.0,
        }
        taken = kernels.row_gradients.arg_names
        return Arguments(
            grid=(sizes.chunks * sizes.batch * sizes.groups, 1, 1),
            tensors={each.capitalize(): each for each in tensors},
            numbers={each: value for each, value in numbers.items() if each in taken},
            tile=tile(sizes, stages=1),
        )

    launch(kernels.row_gradients, call.same, tensors, arguments, name)
