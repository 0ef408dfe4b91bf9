"""A step of decoding: one kernel reads a state and writes the new one over it. Imports triton, so it is imported late.

Further calls with the same layouts are replayed: at one token the host takes longer than the GPU (replaying.py).
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from attn_compiler.lowerings.linear import plain_calls
from attn_compiler.lowerings.linear.kernels import forward as kernels
from attn_compiler.lowerings.linear.triton_passes import edge_strides
from attn_compiler.lowerings.linear.triton_tensors import LinearTensors
from attn_compiler.lowerings.shared.calls.leaf_calls import or_else
from attn_compiler.lowerings.shared.launching.dry_run import noter
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.lowerings.shared.launching.replaying import CallCache, call_cache

_OP = "linear_one_token"
_NAMES = ("q", "k", "v", "g", "beta", "skip", "first")


def one_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor, text: str
) -> Tensor:
    """Compute `attn_compiler::linear_one_token`."""
    operands = [q, k, v, g, beta] if skip is None else [q, k, v, g, beta, skip]
    if noter() is None:
        operands = _apart(operands, state)
    inputs = [*operands, state]
    same = call_cache(_OP, text, inputs)
    if same.replay is not None:
        out: Tensor = same.replay.run(inputs)[0]
        return out
    names = [name for name in _NAMES if skip is not None or name != "skip"]
    launch_all = functools.partial(_first, dict(zip(names, inputs, strict=True)), text, same)
    return or_else(_OP, text, launch_all, functools.partial(_instead, q, k, v, g, beta, skip, state, text))


def _instead(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor, text: str
) -> Tensor:
    out, last = plain_calls.forward(q, k, v, g, beta, skip, state, text)
    state.copy_(last)
    return out


def _apart(operands: list[Tensor], state: Tensor) -> list[Tensor]:
    """Copy operands in the state's memory: programs read operands while others write the state."""
    memory = state.untyped_storage().data_ptr()
    return [x.clone() if x.untyped_storage().data_ptr() == memory else x for x in operands]


def _first(given: dict[str, Tensor], text: str, same: CallCache) -> Tensor:
    """Run the first call of a layout. It is not replayed where an operand has to be copied."""
    call = LinearTensors.of(_OP, dict(given), text)
    with on(same.device):
        call.named["last"] = call.named["first"]
        v, dtype = call.named["v"], getattr(torch, call.form.out_dtype)
        call.named["out"] = same.empty("out", lambda: torch.empty(v.shape, dtype=dtype, device=v.device))
        ready = call.run(kernels.one_token, call.sizes.rows * call.sizes.blocks, **edge_strides(call))
    if ready is not None and all(call.named[name] is x for name, x in given.items()):
        # The state has two names in the launch, and one in a replay.
        where = tuple((at, "first" if name == "last" else name) for at, name in ready.where)
        same.keep([dataclasses.replace(ready, where=where)], inputs=list(given), returned=("out", None))
    return call.named["out"]
