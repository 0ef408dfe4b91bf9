"""Launches of the kernels over a latent, and of the one that adds up their splits. Imports triton, so it is imported late.

As in launch.py, kernels are compiled for the text, a device and alignment, and never for a length, a stride or an address.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime import driver

from attn_compiler.lowerings.decode import definition, latent_schedule, plan as decode_plan, replaying
from attn_compiler.lowerings.decode.kernels.decode_latent import attention_decode_latent, combine_latent
from attn_compiler.lowerings.decode.kernels.latent_sm90_tuples import HopperSwitches
from attn_compiler.lowerings.decode.kernels.tuples import LatentSwitches, MergeSwitches
from attn_compiler.lowerings.decode.plan import DecodeCall, none_too_short
from attn_compiler.lowerings.decode.replaying import DecodeSite, Launched, PreparedCall, empty
from attn_compiler.lowerings.shared.calls import by_definition
from attn_compiler.lowerings.shared.calls.arguments import along, readable
from attn_compiler.lowerings.shared.calls.leaf_calls import or_else
from attn_compiler.lowerings.shared.launching.dry_run import noter
from attn_compiler.lowerings.shared.launching.launch import check_grid
from attn_compiler.lowerings.shared.launching.replaying import VECTOR
from attn_compiler.lowerings.shared.ops.leaf_ops import output_strides
from attn_compiler.lowerings.shared.parts import score_changes

Tensors = Sequence[torch.Tensor]

#: warps of the kernel that adds up
_WARPS = 4
#: the kernel for Hopper: registers of a thread of its second warpgroup, and its operands
_REGISTERS = 240
_ON_HOPPER = frozenset({"bounds", "rope"})
#: for each parameter of the Triton kernel after the partial results, its operand, or either of two
_PARAMETERS = (("bounds",), ("keys",), ("mask", "bias"), ("sinks",))


@dataclass(frozen=True, kw_only=True)
class PreparedLatent(PreparedCall):
    """A call in the kernels' terms.

    blocks: tiles of rows of a batch row.
    rows: of all blocks together that are stored.
    rope: the place of the rope part.
    """

    blocks: int
    rows: int
    rope: int | None


@functools.lru_cache(maxsize=1024)
def prepare(text: str) -> PreparedLatent:
    """Derive everything that follows from the leaf op's text."""
    call = DecodeCall.from_text(text)
    spec, plan, latent = call.spec, decode_plan.plan_of(call), call.spec.latent
    if latent is None or call.schedule.rows is None:
        raise ValueError("the text of a call over a latent names the latent, and the rows of a tile")
    rank, heads, seqlen_q = map(decode_plan.known, (latent.rank, spec.num_heads_q, spec.seqlen_q))
    rows, block = heads * seqlen_q, call.schedule.rows
    blocks = -(-rows // block)
    rope = 0 if latent.rope is None else decode_plan.known(latent.rope.shape[3])
    change, interpreted = spec.score.pointwise, triton.knobs.runtime.interpret
    width = max(triton.next_power_of_2(rank), 16)
    constants = {
        "BLOCK_M": block,
        "BLOCK_N": call.schedule.keys,
        "KEPT": block if blocks > 1 else rows,
        "HEADS_KV": 1,
        "GROUP": heads,
        "SEQLEN_Q": seqlen_q,
        "HEAD_DIM_V": rank,
        "V_0": width,
        "V_1": 0,
        "HEAD_DIM_ROPE": rope,
        "ROPE": max(triton.next_power_of_2(rope), 16) if rope else 0,
        "BOUNDS": plan.bounds_of,
        "MEANS": plan.means,
        "PAIRS_MASK": plan.mask,
        "CHANGE": score_changes.name(change),
        "FAST_TANH": spec.dtype != "float32" and not interpreted,
        "PLAIN": change is None and not plan.bias and spec.score.scale > 0,
        "PRECISION": "ieee",
        "EARLY": call.schedule.early and not interpreted,
    }
    if call.schedule.hopper and (seqlen_q > 1 or "rope" not in plan.operands or {*plan.operands} - _ON_HOPPER):
        rule = "the kernel for Hopper takes one query, bounds of keys, and a part beside the latent"
        raise ValueError(f"{rule}; got {seqlen_q} queries, and {', '.join(plan.operands)}")
    return PreparedLatent(
        schedule=call.schedule,
        plan=plan,
        scale=spec.score.scale,
        changed_by=score_changes.number(change),
        constants=constants,
        blocks=blocks,
        rows=rows,
        given=tuple(plan.place(*names) for names in _PARAMETERS),
        rope=plan.place("rope"),
        typed=tuple(i for i, name in enumerate(plan.operands) if name in ("bias", "sinks")),
    )


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    text: str,
    launched: list[Launched] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out, float32, and lse. k and v: the latent. launched: see `DecodeSite`."""
    return or_else(
        "decode_latent",
        text,
        lambda: _by_kernel(q, k, operands, text, launched),
        lambda: _by_definition(q, k, operands, text),
    )


def _by_definition(
    q: torch.Tensor, latent: torch.Tensor, operands: Tensors, text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, heads, seqlen_q, _), rank = q.shape, latent.shape[3]
    out = empty((batch, heads, seqlen_q, rank), output_strides(heads, seqlen_q, rank), q)
    exact_out, exact_lse = by_definition.forward(definition.attention(q, latent, latent, operands, text))
    return out.copy_(exact_out), exact_lse.to(torch.float32)


def _by_kernel(
    q: torch.Tensor, k: torch.Tensor, operands: Tensors, text: str, launched: list[Launched] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    prepared = prepare(text)
    if noter() is not None:
        # Stand-in tensors leave nothing in the caches.
        prepared = dataclasses.replace(prepared, compiled={})
    if not q.is_cuda or q.get_device() == driver.active.get_current_device():
        return _forward(prepared, q, k, operands, launched)
    with torch.cuda.device(q.device):
        return _forward(prepared, q, k, operands, launched)


#: `forward` for one place in compiled code
ForwardSite = functools.partial(DecodeSite, forward, lambda q, k, _, operands: (q, k, *operands))


def _forward(
    prepared: PreparedLatent,
    q: torch.Tensor,
    latent: torch.Tensor,
    operands: Tensors,
    launched: list[Launched] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels on the current device."""
    rope = None if prepared.rope is None else operands[prepared.rope]
    align = _alignment(q, latent, rope)
    if align == 1:
        launched = None
        q, latent, rope = readable(q), readable(latent), None if rope is None else readable(rope)
        align = _alignment(q, latent, rope)
    (batch, heads, seqlen_q, _), seqlen_kv, rank = q.shape, latent.shape[2], latent.shape[3]
    out = empty((batch, heads, seqlen_q, rank), output_strides(heads, seqlen_q, rank), q)
    lse = empty((batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1), q)
    if batch == 0:
        return out, lse
    check_grid((1, prepared.blocks, batch))
    schedule, constants, known = prepared.schedule, prepared.constants, prepared.compiled
    most = decode_plan.most_splits(schedule, tiles=batch * prepared.blocks)
    splits = schedule.splits or none_too_short(schedule, most, seqlen_kv=seqlen_kv)
    partial, lse_at = None, 0
    if splits > 1:
        kept = batch * prepared.blocks * splits * constants["KEPT"]
        lse_at = kept * rank
        partial = empty((lse_at + kept,), (1,), q)
    begin_at_vectors = [x is None or x.data_ptr() % VECTOR == 0 for x in (q, latent, rope)]
    typed = [operands[place].dtype for place in prepared.typed]
    key = (q.get_device(), align, partial is None, *begin_at_vectors, *typed)
    bounds, keys, pairs, sinks = (None if place is None else operands[place] for place in prepared.given)
    of_bounds = (0, 0) if bounds is None else (bounds.stride(0), along(bounds, 1))
    if schedule.hopper and rope is not None and align > 1 and _lie_apart(q, latent, rope):
        read = (q, latent, rope, out, lse, partial, bounds)
        strides = (q.stride(0), q.stride(1), *_positions(latent), *_positions(rope))
        numbers = (*strides, *of_bounds, lse_at, seqlen_kv, prepared.scale)
        _launch_on_hopper(prepared, key, (prepared.blocks, splits, batch), read, numbers, launched)
    else:
        tensors = (q, latent, rope, out, lse, partial, bounds, keys, pairs, sinks)
        numbers = (
            *q.stride()[:3],
            *_positions(latent),
            *((0, 0) if rope is None else _positions(rope)),
            *of_bounds,
            0 if keys is None else along(keys, 0),
            *((0, 0, 0, 0) if pairs is None else (along(pairs, dim) for dim in range(4))),
            *(lse_at, seqlen_kv, prepared.scale, prepared.changed_by),
        )
        options = {"num_warps": schedule.warps, "num_stages": schedule.stages}
        grid = (splits, prepared.blocks, batch)

        def how() -> LatentSwitches:
            return LatentSwitches(**constants, ALIGN=align)

        replaying.launch(known, attention_decode_latent, key, grid, tensors, numbers, how, launched, **options)
    if partial is not None:
        merge = _merge(prepared, batch, splits=schedule.splits or most)
        grid = (prepared.rows, -(-rank // merge.COLUMNS), batch)
        added, key, sizes = (out, lse, partial, sinks), (*key, merge), (lse_at, splits)
        replaying.launch(known, combine_latent, key, grid, added, sizes, lambda: merge, launched, num_warps=_WARPS)
    return out, lse


def _lie_apart(q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> bool:
    """Return whether the copy engine can read the tensors: at least one key, and rows that do not overlap. Strides of a single head or a
    single key may have any value, and those of an expanded tensor are 0."""
    rows = ((q.stride(1), q.shape[3]), *((x.stride(2), x.shape[3]) for x in (latent, rope)))
    return latent.shape[2] > 0 and all(stride >= width for stride, width in rows)


def _launch_on_hopper(
    prepared: PreparedLatent,
    key: tuple[Any, ...],
    grid: tuple[int, int, int],
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[int | float, ...],
    launched: list[Launched] | None,
) -> None:
    # Imported late: releases of Triton without Gluon's instructions for Hopper run the other kernels.
    from attn_compiler.lowerings.decode.kernels.latent_sm90 import attention_latent_sm90

    constants = prepared.constants
    how = HopperSwitches(
        GROUP=constants["GROUP"],
        SEQLEN_Q=constants["SEQLEN_Q"],
        KEPT=constants["KEPT"],
        MEANS=constants["MEANS"],
        HALF=constants["HEAD_DIM_V"] // 2,
        ROPE=constants["HEAD_DIM_ROPE"],
        STAGES=prepared.schedule.stages,
        REGISTERS=_REGISTERS,
    )
    known, kernel = prepared.compiled, attention_latent_sm90
    replaying.launch(known, kernel, key, grid, tensors, numbers, lambda: how, launched, num_warps=4)


def _merge(prepared: PreparedLatent, batch: int, *, splits: int) -> MergeSwitches:
    """Return the switches of the kernel that adds up. splits: at most, so that a cache that grows needs no further kernel."""
    constants = prepared.constants
    parts, columns = latent_schedule.merging(
        prepared.schedule, rows=prepared.rows * batch, splits=splits, width=constants["V_0"]
    )
    return MergeSwitches(
        PARTS=parts,
        COLUMNS=columns,
        **{name: constants[name] for name in ("BLOCK_M", "KEPT", "GROUP", "SEQLEN_Q", "HEAD_DIM_V", "EARLY")},
    )


def _positions(x: torch.Tensor) -> tuple[int, int]:
    """Return the strides of the batch and of positions."""
    return x.stride(0), x.stride(2)


def _alignment(q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor | None) -> int:
    """Return a vector's elements if every vector is aligned, else 1. Strides of axes of size one count, too."""
    size, together = q.element_size(), q.stride(0) | q.stride(1) | q.stride(2)
    for x in (latent, *(() if rope is None else (rope,))):
        together |= x.stride(0) | x.stride(2)
    together *= size
    for x in (q, latent, *(() if rope is None else (rope,))):
        together |= x.data_ptr() | x.shape[3] * size
    return 1 if together % VECTOR else VECTOR // size
