"""Launches of Hopper's backward kernel and of the kernels before and after it. Imports triton, so it is imported late."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton

from attn_compiler.lowerings.hopper import added, mask_bits, wide_launch
from attn_compiler.lowerings.hopper.kernels import around_backward, backward_sm90
from attn_compiler.lowerings.hopper.kernels.tuples import GradSwitches
from attn_compiler.lowerings.hopper.launch import adding_of, bhsd_strides, masking_of, may_leak, of_all, own_arguments
from attn_compiler.lowerings.hopper.ops import IN_ORDER, grad_operands
from attn_compiler.lowerings.hopper.plan import GradBlocks, grad_blocks_of, grad_dims, is_ordered, is_wide
from attn_compiler.lowerings.shared.calls import gradient_launch, leaf_calls
from attn_compiler.lowerings.shared.calls.arguments import (
    STATS_BLOCK,
    Prepared,
    alignment,
    lists,
    operand_parameters,
    prepare,
    strides,
)
from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.calls.backward_call import BackwardByKernels
from attn_compiler.lowerings.shared.calls.leaf_calls import BackwardArguments
from attn_compiler.lowerings.shared.kernels import backward, kv_backward
from attn_compiler.lowerings.shared.kernels.tuples import Sizes
from attn_compiler.lowerings.shared.launching import persistent
from attn_compiler.lowerings.shared.launching.launch import Arguments, launch
from attn_compiler.lowerings.shared.parts.kernel_plan import head_dim_tiles

#: queries of a program of the kernels before and after the backward
_AROUND, _AROUND_WIDE = 64, 16
#: tiles of queries of a program of `attention_ranks`, and how many it reads at once
_RANKED, _LISTED = 16, 64
#: with at least this many blocks a program, shared reads matter more than the order of blocks
_MANY = 8


def _make_room(shared: Backward) -> None:
    """Allocate float32 sums of dq, a flag and the counter of blocks. With grouped heads also the part of dk and dv that each query head
    adds."""
    same, tensors = shared.same, shared.tensors
    q, k = tensors["Q"], tensors["K"]
    empty = functools.partial(torch.empty, device=q.device)
    if not is_wide(shared.prepared.call.spec):
        tensors["Sums"] = same.empty("Sums", lambda: empty(q.shape, dtype=torch.float32))
    tensors["Flag"] = same.empty("Flag", lambda: empty((2,), dtype=torch.int32))
    for name in ("K", "V") if q.shape[1] > k.shape[1] else ():
        shape = (*q.shape[:2], *tensors[name].shape[2:])
        tensors[f"Each{name}"] = same.empty(f"Each{name}", functools.partial(empty, shape, dtype=q.dtype))


def _rows_together(prepared: Prepared) -> int:
    """Return the largest block of queries of all kernels that read or write row stats. Each block is a power of two."""
    tiles = prepared.call.tiles
    spec = prepared.call.spec
    own = wide_launch.LISTED if is_wide(spec) else grad_blocks_of(spec, prepared.plan).queries
    return max(STATS_BLOCK, _AROUND, own, tiles.grad_q.queries, tiles.grad_kv.queries)


def _make_room_for_turns(shared: Backward) -> None:
    """Allocate as `_make_room`, plus counters of dq's tiles, plus ranks for `attention_ranks` where the mask has lists."""
    _make_room(shared)
    same, tensors = shared.same, shared.tensors
    batch, heads, _, rows = tensors["RowStats"].shape
    empty = functools.partial(torch.empty, dtype=torch.int32, device=tensors["Q"].device)
    tensors["Turns"] = same.empty("Turns", lambda: empty((batch, heads, rows // _AROUND)))
    if "tiles_by_key" in tensors:
        tensors["Ranks"] = same.empty("Ranks", lambda: empty(tensors["tiles_by_key"].shape))


def _is_in_order(shared: Backward) -> bool:
    return "Turns" in shared.tensors


def _run(shared: Backward) -> list[torch.Tensor]:
    shared.launch(around_backward.attention_before_backward, before_arguments)
    if is_wide(shared.prepared.call.spec):
        for grad in wide_launch.PASSES:
            passed = functools.partial(wide_launch.arguments, grad=grad, leaks=leaks(shared))
            shared.launch(wide_launch.kernel_of(grad), passed, grad)
    else:
        # dq, dk and dv in one pass.
        if "Ranks" in shared.tensors:
            shared.launch(around_backward.attention_ranks, rank_arguments)
        shared.launch(backward_sm90.attention_backward_sm90, main_arguments)
        shared.launch(around_backward.attention_after_backward, after_arguments)
    for name in ("K", "V") if "EachK" in shared.tensors else ():
        shared.launch(around_backward.attention_sum_groups, functools.partial(sum_arguments, name=name), name)
    if leaks(shared):
        shared.launch(backward.attention_grad_q, again_q)
        for part in ("k", "v") if shared.prepared.call.tiles.grad_kv.apart else ("kv",):
            shared.launch(kv_backward.attention_grad_kv, functools.partial(again_kv, part=part), part)
    # Sinks are the only operands with a gradient that this family takes.
    return [gradient_launch.grad_sinks(shared) for _ in shared.prepared.plan.differentiable]


def _around(shared: Backward) -> int:
    """Return the rows of a program of the kernels before and after. Registers of a thread limit them."""
    return _AROUND_WIDE if is_wide(shared.prepared.call.spec) else _AROUND


def leaks(shared: Backward) -> bool:
    """Return whether unused keys or queries may turn gradients into NaN (`launch.may_leak`)."""
    return shared.same.fact("leaks", lambda: may_leak(shared.prepared, shared.tensors["Q"], shared.tensors["K"]))


def before_arguments(shared: Backward) -> Arguments:
    """Arguments of the kernel that computes row stats and writes zeros."""
    out, grad_out, rows = shared.tensors["Out"], shared.tensors["GradOut"], shared.tensors["RowStats"].shape[3]
    batch, heads, seqlen_q, _ = out.shape
    numbers = {**strides("o", out), **strides("g", grad_out), "heads_q": heads, "seqlen_q": seqlen_q}
    block = _around(shared)
    numbers |= {"stats_rows": rows, "BLOCK_M": block, "ALIGN": alignment(out, grad_out), **_head_dims(shared)}
    names = ("Out", "GradOut", "Lse", "GradLse", "RowStats", "Flag")
    further = {name: name if name in shared.tensors else None for name in ("Sums", "Turns")}
    tensors = {name: name for name in names} | further
    return own_arguments(grid=(rows // block, heads, batch), tensors=tensors, numbers=numbers)


def rank_arguments(shared: Backward) -> Arguments:
    """Arguments of the kernel that ranks the blocks of each list."""
    prepared, listed = shared.prepared, shared.tensors["tiles_by_key"]
    blocks = grad_blocks_of(prepared.call.spec, prepared.plan)
    tiles = triton.cdiv(shared.tensors["Q"].shape[2], blocks.queries)
    numbers: dict[str, Any] = {**lists(listed), "tiles": tiles, "ORDERED": is_ordered(prepared.call.spec)}
    numbers |= {"blocks": triton.cdiv(shared.tensors["K"].shape[2], blocks.keys)}
    return own_arguments(
        grid=(triton.cdiv(tiles, _RANKED), listed.shape[1], listed.shape[0]),
        tensors={"Lists": "tiles_by_key", "Ranks": "Ranks"},
        numbers=numbers | {"TILES": _RANKED, "LISTED": _LISTED},
    )


def _head_dims(shared: Backward) -> dict[str, int]:
    qk, v = head_dim_tiles(shared.prepared.call.spec)
    q, values = shared.tensors["Q"], shared.tensors["V"]
    return {"HEAD_DIM_QK": q.shape[3], "QK_ALL": qk, "HEAD_DIM_V": values.shape[3], "V_ALL": v}


def after_arguments(shared: Backward) -> Arguments:
    """Arguments of the kernel that turns sums into dq."""
    grad_q = shared.tensors["GradQ"]
    batch, heads, seqlen_q, _ = grad_q.shape
    dims = {name: x for name, x in _head_dims(shared).items() if "QK" in name}
    numbers: dict[str, Any] = {**strides("dq", grad_q), "heads_q": heads, "seqlen_q": seqlen_q, **dims}
    numbers |= {"scale": shared.prepared.call.spec.score.scale, "BLOCK_M": _AROUND, "ALIGN": alignment(grad_q)}
    return own_arguments(
        grid=(triton.cdiv(seqlen_q, _AROUND), heads, batch),
        tensors={name: name for name in ("Sums", "GradQ", "Flag")},
        numbers=numbers | {"MARKS": leaks(shared)},
    )


def sum_arguments(shared: Backward, name: str) -> Arguments:
    """Arguments of the kernel that sums dk or dv over the query heads of a group."""
    each, grad = shared.tensors[f"Each{name}"], shared.tensors[f"Grad{name}"]
    batch, heads, length, head_dim = grad.shape
    numbers: dict[str, Any] = {**strides("e", each), **strides("d", grad), "seqlen": length}
    numbers |= {"group": each.shape[1] // heads, "BLOCK": _around(shared), "ALIGN": alignment(each, grad)}
    return own_arguments(
        grid=(triton.cdiv(length, _around(shared)), heads, batch),
        tensors={"Each": f"Each{name}", "Grad": f"Grad{name}"},
        numbers=numbers | {"HEAD_DIM": head_dim, "ALL": triton.next_power_of_2(head_dim)},
    )


def main_arguments(shared: Backward) -> Arguments:
    """Arguments of the backward kernel itself."""
    prepared, q, k = shared.prepared, shared.tensors["Q"], shared.tensors["K"]
    blocks = grad_blocks_of(prepared.call.spec, prepared.plan)
    every = shared.numbers()
    in_head, heads_of_all = triton.cdiv(k.shape[2], blocks.keys), q.shape[0] * q.shape[1]
    differ = every["HAS_RIGHT"] or is_ordered(prepared.call.spec)
    outputs = {f"Grad{x}": f"Each{x}" if f"Each{x}" in shared.tensors else f"Grad{x}" for x in "KV"}
    of_strides = {"q": "Q", "k": "K", "v": "V", "g": "GradOut", "s": "Sums"}
    of_strides |= {"dk": outputs["GradK"], "dv": outputs["GradV"]}
    numbers = {
        **every,
        **lists(shared.tensors.get("tiles_by_key")),
        **{f"stride_{name}": bhsd_strides(shared.tensors[of]) for name, of in of_strides.items()},
        "section": _section(shared, every, in_head, heads_of_all) if differ or _is_in_order(shared) else 1,
        "blocks": in_head,
        "heads_of_all": heads_of_all,
        "adding": adding_of(shared.tensors),
        "masking": masking_of(every["masking"], shared.tensors.get(mask_bits.BY_KEY), by_key=True),
        "HOW": switches(prepared, every, blocks, leaks=leaks(shared), in_order=_is_in_order(shared)),
    }
    wanted = {*backward_sm90.attention_backward_sm90.arg_names, *Sizes._fields}
    given = {**operand_parameters(prepared), "Lists": prepared.present("tiles_by_key")}
    given["Added"] = added.NAME if added.NAME in shared.tensors else None
    given["Bits"] = mask_bits.BY_KEY if mask_bits.is_there(prepared.plan) else None
    given |= {name: name if name in shared.tensors else None for name in ("Turns", "Ranks")}
    names = ("Q", "K", "V", "GradOut", "RowStats", "Sums", "Flag")
    return own_arguments(
        grid=persistent.programs(in_head * heads_of_all, q.device),
        tensors={name: name for name in names}
        | outputs
        | {name: source for name, source in given.items() if name in wanted},
        numbers={name: x for name, x in numbers.items() if name in wanted},
        tile=blocks.tile,
    )


def _section(shared: Backward, numbers: Mapping[str, Any], blocks: int, heads_of_all: int) -> int:
    """Return the number of heads in a section (`scheduling_sm90.place`), whose queries, output gradient and dq sums should stay in the L2
    cache. With few blocks for each program all heads form one section, so that the longest blocks of all come first. H200, 16/4 heads, D
    128, S 8192, padded: 388 TFLOP/s instead of 313. In a fixed order, blocks of a head wait for each other: `persistent.heads_at_once`."""
    q = shared.tensors["Q"]
    programs = persistent.programs(blocks * heads_of_all, q.device)[0]
    if _is_in_order(shared):
        return persistent.heads_at_once(heads_of_all, programs)
    if blocks * heads_of_all < _MANY * programs:
        return heads_of_all
    tensors = [shared.tensors[name] for name in ("Q", "GradOut", "Sums")]
    return persistent.section_of(tensors, heads=heads_of_all, part=min(1.0, persistent.reach(numbers) / q.shape[2]))


def switches(
    prepared: Prepared, numbers: Mapping[str, Any], blocks: GradBlocks, *, leaks: bool, in_order: bool
) -> GradSwitches:
    """Return the kernel's compile-time switches. numbers: `arguments.common`.

    In a fixed order, tiles that need their mask lie on both sides of those that don't, and each block visits its tiles from the last one
    on.
    """
    qk, v = head_dim_tiles(prepared.call.spec)
    multiplied = grad_dims(prepared.call.spec)
    on_both_sides = prepared.plan.tiles or numbers["HAS_LEFT"]
    every = of_all(prepared, numbers, leaks=leaks)
    return GradSwitches(
        **{**every, "MASK_ALL": every["MASK_ALL"] or (in_order and on_both_sides)},
        QK_ALL=qk,
        V_ALL=v,
        QK=multiplied[0],
        V=multiplied[1],
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        STAGES=blocks.stages,
        SUM_COLUMNS=blocks.sum_columns(qk),
        REGISTERS=blocks.registers,
        IN_ORDER=in_order,
        ADDED=added.is_there(prepared.plan),
    )


def again_q(shared: Backward) -> Arguments:
    """Arguments of a second dq kernel that masks every tile: its blocks have no lists, and it is seldom needed."""
    return _again(gradient_launch.grad_q(shared))


def again_kv(shared: Backward, part: str) -> Arguments:
    """Arguments of a second kernel for dk and dv, as `again_q`."""
    return _again(gradient_launch.grad_kv(shared, part=part))


def _again(found: Arguments) -> Arguments:
    return Arguments(
        grid=found.grid,
        tensors={**found.tensors, "Tiles": None, "Wanted": "Flag"},
        numbers={**found.numbers, **lists(None), "MASK_ALL": True},
        tile=found.tile,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Gradients(BackwardByKernels):
    """The backward, which copies the added tensor first where the copy engine can't read it."""

    def begin(self, *arguments: Any) -> Backward:
        given = BackwardArguments(*arguments)
        if added.begins_between_vectors(prepare(given.text).plan, given.operands):
            given = given._replace(operands=added.with_copy(given.operands))
        return BackwardByKernels.begin(self, *given)


gradients = _Gradients(
    op="hopper_backward",
    operands=lambda prepared: grad_operands(prepared.call.spec),
    rows_together=_rows_together,
    start=lambda *given: launch(*given),
    make_room=_make_room,
    run=_run,
)

#: `gradients` for one place in compiled code
BackwardSite = functools.partial(leaf_calls.BackwardSite, gradients)

#: the same, summed in the same order in every run
gradients_in_order = dataclasses.replace(gradients, op=f"{IN_ORDER}_backward", make_room=_make_room_for_turns)
BackwardSiteInOrder = functools.partial(leaf_calls.BackwardSite, gradients_in_order)
