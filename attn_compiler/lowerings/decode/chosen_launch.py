"""Calls the kernel for many queries over chosen keys of a latent. Imports triton, so it comes late."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from attn_compiler.lowerings.decode import plan as decode_plan
from attn_compiler.lowerings.decode.kernels.chosen_latent import attention_chosen_latent
from attn_compiler.lowerings.decode.kernels.tuples import ChosenSwitches
from attn_compiler.lowerings.decode.plan import DecodeCall, Schedule
from attn_compiler.lowerings.shared.calls import by_definition
from attn_compiler.lowerings.shared.calls.by_definition import Attention
from attn_compiler.lowerings.shared.calls.leaf_calls import or_else
from attn_compiler.lowerings.shared.calls.readable import readable
from attn_compiler.lowerings.shared.launching.launch import check_grid, first_launch
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.lowerings.shared.launching.replaying import VECTOR
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_outputs

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Given:
    """A call's tensors. keys: int64 (B · Sq, chosen). counts: bool (B · Sq, chosen), which of these count; None: all do."""

    q: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor | None
    keys: torch.Tensor
    counts: torch.Tensor | None


@functools.lru_cache(maxsize=1024)
def _prepare(text: str) -> tuple[Schedule, bool, float]:
    """How the kernel is compiled, whether there is a part beside the latent, and the scale."""
    call = DecodeCall.from_text(text)
    latent = call.spec.latent
    if latent is None or call.schedule.rows is None:
        raise ValueError("the text of a call over chosen keys names the latent, and the rows of a tile")
    return call.schedule, latent.rope is not None, call.spec.score.scale


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, H, Sq, rank) in q's dtype, and lse. q: (B, H, Sq, rank + rope dims); k and v: the latent; operands: the part beside it, if
    there is one, the keys, and which of these count, unless all do."""
    schedule, has_rope, scale = _prepare(text)
    rope, further = (operands[0], operands[1:]) if has_rope else (None, operands)
    given = Given(q=q, latent=k, rope=rope, keys=further[0], counts=further[1] if len(further) > 1 else None)
    return or_else(
        "chosen_latent", text, lambda: by_kernel(given, schedule, scale), lambda: by_definition_of(given, scale)
    )


def by_definition_of(given: Given, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `by_kernel`, with a truth value for each pair."""
    q, latent = given.q, given.latent
    seqlen_kv = latent.shape[2]
    used = (given.keys >= 0) & (given.keys < seqlen_kv)
    used = used if given.counts is None else used & given.counts
    # What does not count falls behind the last key.
    mask = torch.zeros((*used.shape[:1], seqlen_kv + 1), dtype=torch.bool, device=q.device)
    mask = mask.scatter_(1, torch.where(used, given.keys, seqlen_kv), True)[:, :seqlen_kv].contiguous()
    k = latent if given.rope is None else torch.cat((latent, given.rope), 3)
    asked = Attention(
        q=q,
        k=k,
        v=latent,
        tensors={"mask": mask.view(q.shape[0], 1, q.shape[2], seqlen_kv)},
        scale=scale,
    )
    out, lse = empty_outputs(q, latent)
    exact_out, exact_lse = by_definition.forward(asked)
    return out.copy_(exact_out), lse.copy_(exact_lse)


def by_kernel(given: Given, schedule: Schedule, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `forward`."""
    q, latent, rope = given.q, given.latent, given.rope
    size = q.element_size()
    align = VECTOR // size if all(_is_aligned(x) for x in (q, latent, rope) if x is not None) else 1
    if align == 1:
        q, latent, rope = readable(q), readable(latent), None if rope is None else readable(rope)
    (batch, heads, seqlen_q, _), seqlen_kv, rank = q.shape, latent.shape[2], latent.shape[3]
    out, lse = empty_outputs(q, latent)
    rows = decode_plan.known(schedule.rows or 0)
    grid = (seqlen_q, triton.cdiv(heads, rows), batch)
    if 0 in grid:
        return out, lse
    check_grid(grid)
    beside = 0 if rope is None else rope.shape[3]
    how = ChosenSwitches(
        BLOCK_M=rows,
        BLOCK_N=schedule.keys,
        RANK=rank,
        WIDTH=max(triton.next_power_of_2(rank), 16),
        ROPE=beside,
        ROPE_WIDTH=max(triton.next_power_of_2(beside), 16) if beside else 0,
        PRECISION="ieee",
        ALIGN=align,
    )
    keys = given.keys.contiguous()
    counts = None if given.counts is None else given.counts.contiguous()
    numbers = (
        *q.stride()[:3],
        *out.stride()[:3],
        latent.stride(0),
        latent.stride(2),
        *((0, 0) if rope is None else (rope.stride(0), rope.stride(2))),
        keys.stride(0),
        0 if counts is None else counts.stride(0),
        heads,
        seqlen_q,
        seqlen_kv,
        keys.shape[1],
        scale,
    )
    tensors = (q, latent, rope, out, lse, keys, counts)
    with on(q.device):
        first_launch(
            attention_chosen_latent,
            grid,
            *tensors,
            *numbers,
            HOW=how,
            num_warps=schedule.warps,
            num_stages=schedule.stages,
        )
    return out, lse


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether each head and position begins at a vector."""
    offsets = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    return x.data_ptr() % VECTOR == 0 and all(stride * x.element_size() % VECTOR == 0 for stride in offsets)
