"""How the kernel over a latent is launched, and the one that adds up what its splits leave. Imports triton, so it comes late.

As launch.py: compiled for what the text says, a device and alignment, and never for a length, a stride or an address.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime import driver

from attn_compiler.lowerings.decode import plan as decode_plan
from attn_compiler.lowerings.decode.kernels.decode_latent import attention_decode_latent, combine_latent
from attn_compiler.lowerings.decode.kernels.tuples import LatentSwitches
from attn_compiler.lowerings.decode.plan import DecodeCall, DecodePlan, Schedule, none_too_short
from attn_compiler.lowerings.decode.replaying import DecodeSite, Launched
from attn_compiler.lowerings.shared import score_changes
from attn_compiler.lowerings.shared.arguments import along
from attn_compiler.lowerings.shared.launching import check_grid, first_launch, plain, start
from attn_compiler.lowerings.shared.noting import noter
from attn_compiler.lowerings.shared.ops import output_strides
from attn_compiler.lowerings.shared.readable import readable
from attn_compiler.lowerings.shared.replaying import VECTOR
from attn_compiler.torch_compat import empty_strided

Tensors = Sequence[torch.Tensor]

#: dims that a program adds up, partial results that it adds up at a time, and its warps
_COLUMNS, _PARTS, _WARPS = 128, 16, 4
#: of what the kernel takes after the partial results, the operand that each is, or either of two
_PARAMETERS = (("bounds",), ("keys",), ("mask", "bias"), ("sinks",))


@dataclass(frozen=True, kw_only=True)
class PreparedLatent:
    """A Call as the kernels take it.

    constants: what they are compiled for, without the alignment.
    blocks: tiles of rows of a batch row.
    rows: of all blocks together that are stored.
    given: for each parameter from Bounds on, its place among the operands, or None.
    rope: the place of the rope part.
    typed: the places of operands whose dtype the text does not say.
    compiled: a kernel and its constants, by what else it was compiled for.
    """

    schedule: Schedule
    plan: DecodePlan
    scale: float
    changed_by: float
    constants: dict[str, Any]
    blocks: int
    rows: int
    given: tuple[int | None, ...]
    rope: int | None
    typed: tuple[int, ...]
    compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict)


@functools.lru_cache(maxsize=1024)
def prepare(text: str) -> PreparedLatent:
    """Everything that follows from the leaf op's text."""
    call = DecodeCall.from_text(text)
    spec, plan, latent = call.spec, decode_plan.of(call), call.spec.latent
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
        "PARTS": _PARTS,
        "COLUMNS": min(_COLUMNS, width),
        "KEPT": block if blocks > 1 else rows,
        "HEADS_KV": 1,
        "GROUP": heads,
        "SEQLEN_Q": seqlen_q,
        "HEAD_DIM_V": rank,
        "V_0": width,
        "V_1": 0,
        "HEAD_DIM_ROPE": rope,
        "ROPE": max(triton.next_power_of_2(rope), 16) if rope else 0,
        "PAIRS_MASK": plan.mask,
        "CHANGE": score_changes.name(change),
        "FAST_TANH": spec.dtype != "float32" and not interpreted,
        "PLAIN": change is None and not plan.bias and spec.score.scale > 0,
        "PRECISION": "ieee",
        "EARLY": call.schedule.early and not interpreted,
    }
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
    """out, float32, and lse. k and v: the latent. launched: see `DecodeSite`."""
    prepared = prepare(text)
    if noter() is not None:
        # Nothing is kept of stand-ins.
        prepared = dataclasses.replace(prepared, compiled={})
    if not q.is_cuda or q.get_device() == driver.active.get_current_device():
        return _forward(prepared, q, k, operands, launched)
    with torch.cuda.device(q.device):
        return _forward(prepared, q, k, operands, launched)


def _read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Of the tensors of a call. v is k."""
    return (q, k, *operands)


#: `forward` for one place in compiled code
ForwardSite = functools.partial(DecodeSite, forward, _read)


def _forward(
    prepared: PreparedLatent,
    q: torch.Tensor,
    latent: torch.Tensor,
    operands: Tensors,
    launched: list[Launched] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """On the current device."""
    rope = None if prepared.rope is None else operands[prepared.rope]
    align = _alignment(q, latent, rope)
    if align == 1:
        launched = None
        q, latent, rope = readable(q), readable(latent), None if rope is None else readable(rope)
        align = _alignment(q, latent, rope)
    (batch, heads, seqlen_q, _), seqlen_kv, rank = q.shape, latent.shape[2], latent.shape[3]
    out = _empty((batch, heads, seqlen_q, rank), output_strides(heads, seqlen_q, rank), q)
    lse = _empty((batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1), q)
    if batch == 0:
        return out, lse
    check_grid((1, prepared.blocks, batch))
    schedule, constants = prepared.schedule, prepared.constants
    most = decode_plan.most_splits(schedule, tiles=batch * prepared.blocks)
    splits = schedule.splits or none_too_short(schedule, most, seqlen_kv=seqlen_kv)
    partial, lse_at = None, 0
    if splits > 1:
        kept = batch * prepared.blocks * splits * constants["KEPT"]
        lse_at = kept * rank
        partial = _empty((lse_at + kept,), (1,), q)
    bounds, keys, pairs, sinks = (None if place is None else operands[place] for place in prepared.given)
    numbers = (
        *q.stride()[:3],
        *_positions(latent),
        *((0, 0) if rope is None else _positions(rope)),
        *((0, 0) if bounds is None else (bounds.stride(0), along(bounds, 1))),
        0 if keys is None else along(keys, 0),
        *((0, 0, 0, 0) if pairs is None else (along(pairs, dim) for dim in range(4))),
        *(lse_at, seqlen_kv, prepared.scale, prepared.changed_by),
    )
    begin_at_vectors = [x is None or x.data_ptr() % VECTOR == 0 for x in (q, latent, rope)]
    typed = [operands[place].dtype for place in prepared.typed]
    key = (q.get_device(), align, partial is None, *begin_at_vectors, *typed)
    tensors = (q, latent, rope, out, lse, partial, bounds, keys, pairs, sinks)
    options = {"num_warps": schedule.warps, "num_stages": schedule.stages}
    _launch(
        prepared, attention_decode_latent, key, (splits, prepared.blocks, batch), tensors, numbers, options, launched
    )
    if partial is not None:
        parts = -(-rank // constants["COLUMNS"])
        grid = (prepared.rows, parts, batch)
        added = (out, lse, partial, sinks)
        _launch(prepared, combine_latent, key, grid, added, (lse_at, splits), {"num_warps": _WARPS}, launched)
    return out, lse


def _empty(size: tuple[int, ...], stride: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """float32; without memory where launches are noted."""
    if noter() is not None:
        return torch.empty_strided(size, stride, dtype=torch.float32, device=like.device)
    return empty_strided(size, stride, torch.float32, like.device.type)


def _positions(x: torch.Tensor) -> tuple[int, int]:
    """The strides of the batch and of positions."""
    return x.stride(0), x.stride(2)


def _alignment(q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor | None) -> int:
    """A vector's elements if every vector is aligned, else 1. An axis of size one counts like any other."""
    size, together = q.element_size(), q.stride(0) | q.stride(1) | q.stride(2)
    for x in (latent, *(() if rope is None else (rope,))):
        together |= x.stride(0) | x.stride(2)
    together *= size
    for x in (q, latent, *(() if rope is None else (rope,))):
        together |= x.data_ptr() | x.shape[3] * size
    return 1 if together % VECTOR else VECTOR // size


def _launch(
    prepared: PreparedLatent,
    kernel: Any,
    key: tuple[Any, ...],
    grid: tuple[int, int, int],
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[int | float, ...],
    options: dict[str, Any],
    launched: list[Launched] | None,
) -> None:
    """key: what the kernel is compiled for besides the text; its second entry is ALIGN. tensors, numbers: as the kernel's parameters."""
    found = prepared.compiled.get((kernel is combine_latent, key))
    if found is None:
        switches = LatentSwitches(**prepared.constants, ALIGN=key[1])
        options = options | ({"launch_pdl": True} if switches.EARLY else {})
        compiled = first_launch(kernel, grid, *tensors, *numbers, HOW=switches, **options)
        if compiled is None:
            return
        found = prepared.compiled[kernel is combine_latent, key] = compiled, plain(switches)
    else:
        compiled, how = found
        start(compiled, grid, key[0], (*[None if t is None else t.data_ptr() for t in tensors], *numbers, how))
    if launched is not None:
        compiled, how = found
        launched.append(Launched(compiled=compiled, grid=grid, tensors=tensors, values=(*numbers, how)))
