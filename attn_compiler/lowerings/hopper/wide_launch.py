"""Launches of Hopper's backward passes for q, k and v with head dims above 256. Imports triton, so it is imported late."""

from __future__ import annotations

from typing import Any

import torch
import triton

from attn_compiler.lowerings.hopper.kernels import wide_backward_sm90, wide_values_sm90
from attn_compiler.lowerings.hopper.kernels.tuples import WideSwitches
from attn_compiler.lowerings.hopper.launch import bhsd_strides, of_all, own_arguments
from attn_compiler.lowerings.hopper.plan import (
    WIDE_PASS,
    WideGradBlocks,
    is_ordered,
    multiplied,
    wide_blocks_of,
    wide_head_dims,
)
from attn_compiler.lowerings.shared.calls.arguments import Prepared, lists, operand_parameters
from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.kernels.tuples import Sizes
from attn_compiler.lowerings.shared.launching import persistent
from attn_compiler.lowerings.shared.launching.launch import Arguments

#: gradients with a pass each, in the order of their launches
PASSES = ("q", "k", "v")
#: queries or keys that share one list of tiles; blocks for parts of them may be empty
LISTED = 128
#: With fewer blocks a program than the first, long blocks of a section meet long ones; it then gets as many as the second.
_FEW, _ENOUGH = 1.5, 4


def kernel_of(grad: str) -> Any:
    return wide_values_sm90.attention_grad_v_wide_sm90 if grad == "v" else wide_backward_sm90.attention_grad_wide_sm90


def arguments(shared: Backward, *, grad: str, leaks: bool) -> Arguments:
    """Arguments of the pass for the gradient of "q", "k" or "v". leaks: unused keys or queries may turn gradients into NaN."""
    tensors, every, prepared = shared.tensors, shared.numbers(), shared.prepared
    spec, by_key = prepared.call.spec, grad != "q"
    blocks = wide_blocks_of(spec, grad)
    listed = tensors.get("tiles_by_key" if by_key else "tiles")
    target = f"Grad{grad.upper()}"
    target = f"Each{grad.upper()}" if f"Each{grad.upper()}" in tensors else target
    rows = tensors["K" if by_key else "Q"].shape[2]
    heads_of_all = tensors["Q"].shape[0] * tensors["Q"].shape[1]
    together = 1 if listed is None else LISTED // blocks.rows
    in_head = triton.cdiv(rows, blocks.rows * together) * together
    of_strides = {"q": "Q", "k": "K", "v": "V", "g": "GradOut", "grad": target, "dv": target}
    numbers: dict[str, Any] = {
        **every,
        **lists(listed),
        **{f"stride_{name}": bhsd_strides(tensors[of]) for name, of in of_strides.items()},
        "section": _section(shared, every, in_head, heads_of_all, by_key=by_key),
        "blocks": in_head,
        "heads_of_all": heads_of_all,
        "HOW": _switches(prepared, every, blocks, grad=grad, leaks=leaks, together=together),
    }
    kernel = kernel_of(grad)
    wanted = {*kernel.arg_names, *Sizes._fields}
    given = {**operand_parameters(prepared), "Lists": None if listed is None else "tiles_by_key" if by_key else "tiles"}
    given |= {name: name for name in ("Q", "K", "V", "GradOut", "RowStats", "Flag")} | {"Grad": target, "GradV": target}
    return own_arguments(
        grid=persistent.programs(in_head * heads_of_all, tensors["Q"].device),
        tensors={name: source for name, source in given.items() if name in wanted},
        numbers={name: x for name, x in numbers.items() if name in wanted},
        tile=blocks.launched,
    )


def _section(shared: Backward, numbers: dict[str, Any], blocks: int, heads_of_all: int, *, by_key: bool) -> int:
    """Return the number of heads in a section (`scheduling_sm90.place`): their reads should stay in the L2 cache, and every program should
    have several blocks of a section. H200, dv up to a diagonal, D 512, with one block a program and with four: S 8192 253 and 432
    TFLOP/s, S 2048 258 and 357."""
    q, k, v = (shared.tensors[name] for name in "QKV")
    if not (numbers["HAS_RIGHT"] or is_ordered(shared.prepared.call.spec)):
        return 1
    reach = persistent.reach(numbers)
    if by_key:
        tensors: list[torch.Tensor] = [q, shared.tensors["GradOut"]]
        cached = persistent.section_of(tensors, heads=heads_of_all, part=min(1.0, reach / q.shape[2]))
    else:
        cached = persistent.section(k, v, heads_q=q.shape[1], reach=reach)
    programs = persistent.programs(blocks * heads_of_all, q.device)[0]
    if cached * blocks >= _FEW * programs:
        return cached
    return min(-(-_ENOUGH * programs // blocks), heads_of_all)


def _switches(
    prepared: Prepared, numbers: dict[str, Any], blocks: WideGradBlocks, *, grad: str, leaks: bool, together: int
) -> WideSwitches:
    """Return a kernel's compile-time switches. numbers: `arguments.common`."""
    spec, by_key = prepared.call.spec, grad != "q"
    qk, v = (multiplied(spec)[0], WIDE_PASS) if grad == "v" else wide_head_dims(spec)
    return WideSwitches(
        **of_all(prepared, numbers, leaks=leaks),
        QK_ALL=qk,
        V_ALL=v,
        BLOCK_M=blocks.tile if by_key else blocks.rows,
        BLOCK_N=blocks.rows if by_key else blocks.tile,
        TILE=blocks.tile,
        TOGETHER=together,
        PART=blocks.part,
        PART_V=blocks.part_v,
        STAGES=blocks.stages,
        STAGES_V=blocks.stages_v,
        BY_KEY=by_key,
        CONSUMERS=2 if grad == "v" else 1,
        QUERY_STAGES=1,
        REGISTERS=blocks.registers,
    )
