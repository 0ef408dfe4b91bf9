"""Launches of the Triton kernels: grids, outputs, arguments. Imports triton, so it is imported late.

A kernel is compiled for its Plan's switches and the tensors' alignment, never for their sizes: one compiled kernel serves every sequence
length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
import triton

from attn_compiler.lowerings.shared.calls import gradient_launch, leaf_calls
from attn_compiler.lowerings.shared.calls.arguments import (
    STATS_BLOCK,
    Named,
    Prepared,
    alignment,
    common,
    lists,
    operand_parameters,
    strides,
)
from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.calls.backward_call import BackwardByKernels
from attn_compiler.lowerings.shared.calls.forward_call import Forward
from attn_compiler.lowerings.shared.kernels import forward as forward_kernels
from attn_compiler.lowerings.shared.launching.launch import Arguments, ReadyKernel, launch
from attn_compiler.lowerings.shared.launching.replaying import CallCache

#: a learned bias' backward keeps the scores' gradients up to this size, and computes larger ones twice: see `_add_scores`
_MOST_KEPT_BYTES = 2 << 30
# Elements: rows of the kept scores begin at whole vectors.
_PITCH = 16


def _run_forward(prepared: Prepared, same: CallCache, tensors: Named) -> list[ReadyKernel | None]:
    arguments = functools.partial(_forward, prepared, tensors)
    return [launch(forward_kernels.attention_forward, same, tensors, arguments)]


forward = Forward(op="triton", operands=lambda prepared: prepared.operands, run=_run_forward)

#: `forward` for one place in compiled code
ForwardSite = functools.partial(leaf_calls.ForwardSite, forward)


def _forward(prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> Arguments:
    tile, q = prepared.call.tiles.forward, tensors["Q"]
    numbers = {**common(prepared, tensors), **lists(tensors.get("tiles")), **strides("o", tensors["Out"])}
    names = {name: name for name in ("Q", "K", "V", "Out", "Lse")}
    further = {"Tiles": prepared.present("tiles"), "Sinks": prepared.present("sinks")}
    heads_last = gradient_launch.heads_last(tensors)
    return Arguments(
        grid=gradient_launch.grid(triton.cdiv(q.shape[2], tile.queries), q.shape[1], q.shape[0], heads_last),
        tensors={**names, **further, **operand_parameters(prepared)},
        numbers=numbers | {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "HEADS_LAST": heads_last},
        tile=tile,
    )


def single_gradients(shared: Backward) -> dict[str, Callable[[], None]]:
    """Return for each kernel with a tile in `Tiles` a call that runs it alone, to be measured: as `gradients` would launch it.

    The calls launch on the current device, which has to be the tensors'.
    """
    _launch_row_stats(shared)
    return {"grad_q": functools.partial(_launch_grad_q, shared), "grad_kv": functools.partial(_launch_grad_kv, shared)}


def _run_backward(shared: Backward) -> list[torch.Tensor]:
    if shared.keeps_scores:
        _launch_row_stats(shared)
        _launch_grad_kv(shared)
        _launch_grad_q(shared)
    else:
        _launch_grad_q(shared)
        _launch_grad_kv(shared)
    return [_grad_operand(name)(shared) for name in shared.prepared.plan.differentiable]


def _grad_operand(name: str) -> Callable[[Backward], torch.Tensor]:
    """Return the function that computes an operand's gradient."""
    if name == "sinks":
        return gradient_launch.grad_sinks
    # Imported late, here and below: defining kernels takes time in each process, which may not train, or learn no bias.
    from attn_compiler.lowerings.triton import launch_added

    return {"bias": launch_added.grad_bias, "distances": launch_added.grad_distances}[name]


def _add_scores(shared: Backward) -> None:
    """Allocate the scores' gradients, (B, Hq, Skv, pitch), where a bias is learned: five products instead of nine.

    As much memory as the gradient that PyTorch's own kernels make for such a bias, before they sum it.
    """
    if shared.same.fact("keeps scores", lambda: _keeps_scores(shared)):
        q, k = shared.tensors["Q"], shared.tensors["K"]
        make = functools.partial(torch.empty, _scores_shape(q, k), dtype=q.dtype, device=q.device)
        shared.tensors["Scores"] = shared.same.empty("Scores", make)
        from attn_compiler.lowerings.triton import launch_added

        launch_added.add_further(shared)


def _keeps_scores(shared: Backward) -> bool:
    plan, score = shared.prepared.plan, shared.prepared.call.spec.score
    # A softcap is applied before the bias: its derivative needs the products again.
    if not (plan.bias_grad or plan.distances_grad) or score.pointwise is not None:
        return False
    q = shared.tensors["Q"]
    return math.prod(_scores_shape(q, shared.tensors["K"])) * q.element_size() <= _MOST_KEPT_BYTES


def _scores_shape(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int, int, int]:
    pitch = triton.cdiv(q.shape[2], _PITCH) * _PITCH
    return (q.shape[0], q.shape[1], k.shape[2], pitch)


def _row_stats(shared: Backward) -> Arguments:
    out, grad_out = shared.tensors["Out"], shared.tensors["GradOut"]
    batch, heads, seqlen_q, head_dim = out.shape
    rows = shared.tensors["RowStats"].shape[3]
    numbers = {**strides("o", out), **strides("g", grad_out), "heads_q": heads, "seqlen_q": seqlen_q}
    numbers |= {"stats_rows": rows, "BLOCK_M": STATS_BLOCK, "HEAD_DIM_V": head_dim, "ALIGN": alignment(out, grad_out)}
    numbers["V_ALL"] = max(16, triton.next_power_of_2(head_dim))
    return Arguments(
        grid=(rows // STATS_BLOCK, heads, batch),
        tensors={name: name for name in ("Out", "GradOut", "Lse", "GradLse", "RowStats")},
        numbers=numbers,
    )


def _launch_row_stats(shared: Backward) -> None:
    from attn_compiler.lowerings.shared.kernels import backward

    shared.launch(backward.attention_row_stats, _row_stats)


def _launch_grad_q(shared: Backward) -> None:
    if shared.keeps_scores:
        from attn_compiler.lowerings.triton import launch_added

        launch_added.launch_grad_q_kept(shared)
    else:
        from attn_compiler.lowerings.shared.kernels import backward

        shared.launch(backward.attention_grad_q, gradient_launch.grad_q)


def _launch_grad_kv(shared: Backward) -> None:
    from attn_compiler.lowerings.shared.kernels import kv_backward

    for part in ("k", "v") if shared.prepared.call.tiles.grad_kv.apart else ("kv",):
        shared.launch(kv_backward.attention_grad_kv, functools.partial(gradient_launch.grad_kv, part=part), part)


gradients = BackwardByKernels(
    op="triton_backward",
    operands=lambda prepared: prepared.operands,
    rows_together=gradient_launch.rounded_to,
    start=lambda *given: launch(*given),
    make_room=_add_scores,
    run=_run_backward,
)
#: a backward of which single kernels are launched
begin_backward = gradients.begin

#: `gradients` for one place in compiled code
BackwardSite = functools.partial(leaf_calls.BackwardSite, gradients)
