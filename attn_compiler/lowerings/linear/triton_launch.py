"""Launches of the forward kernels of linear attention. Imports triton, so it is imported late."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.linear import plain_calls
from attn_compiler.lowerings.linear.kernels import channel, forward as kernels
from attn_compiler.lowerings.linear.triton_passes import edge_strides, states
from attn_compiler.lowerings.linear.triton_sizes import empty, wide
from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from attn_compiler.lowerings.shared.calls.leaf_calls import or_else
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.spec.linear import LinearForm


def forward(*given: Any) -> tuple[Tensor, Tensor]:
    """Compute `linear_chunks`; by plain ops where a kernel can't be compiled or started."""
    launch_all, instead = functools.partial(_launched, *given), functools.partial(plain_calls.forward, *given)
    return or_else("linear_chunks", given[-1], launch_all, instead)


def _launched(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None, text: str
) -> tuple[Tensor, Tensor]:
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "skip": skip, "first": state}
    call = LinearTensors.of("linear_chunks", given, text)
    with on(v.device):
        out, last = outputs(call.form, q, v)
        call.named.update(out=out, last=last)
        if v.shape[1] == 1:
            call.run(kernels.one_token, call.sizes.rows * call.sizes.blocks, **edge_strides(call))
        else:
            chunks(call)
            states(call)
    return out, last


def outputs(form: LinearForm, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the result, and the last state in the function's order."""
    batch, _, heads, dim_v = v.shape
    dim_k = q.shape[3]
    state = (batch, heads, dim_v, dim_k) if form.recurrence == "ssd" else (batch, heads, dim_k, dim_v)
    out = torch.empty(v.shape, dtype=getattr(torch, form.out_dtype), device=v.device)
    return out, torch.empty(state, dtype=getattr(torch, form.state_dtype), device=v.device)


def chunks(call: LinearTensors) -> None:
    """Compute all that does not depend on the state."""
    sizes, named = call.sizes, call.named
    q, many = named["q"], (sizes.batch, sizes.heads, sizes.chunks)
    if call.is_delta or not call.on_hopper:
        named["pairs"] = sizes.in_parts((*many, sizes.chunk, sizes.chunk), q)
    named["norms"] = empty((*many, 2, sizes.chunk), q)
    if call.is_delta:
        named["inverse"] = sizes.in_parts((*many, sizes.chunk, sizes.chunk), q)
    named["factors"] = empty((*many, 5, sizes.chunk), q)
    if not call.form.channel:
        named["sums"] = empty((*many, 2, sizes.chunk), q)
        call.run(kernels.head_chunks, sizes.rows * sizes.chunks, registers=sizes.registers)
        return
    rows = (*many, sizes.chunk, wide(sizes.dim_k))
    named["sums"] = empty(rows, q)
    named.update({name: sizes.in_parts(rows, q) for name in ("queries", "early", "later")})
    warps, share = 2 if sizes.chunk == 32 else 4, min(32, wide(sizes.dim_k), wide(sizes.dim_v))
    call.run(channel.channel_chunks, sizes.rows * sizes.chunks, warps, KEEPS="grad" in named, DS=share)
