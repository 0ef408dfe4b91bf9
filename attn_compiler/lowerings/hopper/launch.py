"""Launches of Hopper's forward kernel, then of the kernel that recomputes marked rows. Imports triton, so it is imported late."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attn_compiler.lowerings.hopper import added, mask_bits
from attn_compiler.lowerings.hopper.kernels import forward_sm90, forward_wide_sm90
from attn_compiler.lowerings.hopper.kernels.tuples import Adding, ForwardSwitches
from attn_compiler.lowerings.hopper.plan import (
    ForwardBlocks,
    blocks_of,
    is_ordered,
    is_wide,
    leaves_from_queries,
    multiplied,
)
from attn_compiler.lowerings.shared.calls import leaf_calls
from attn_compiler.lowerings.shared.calls.arguments import (
    Named,
    Prepared,
    along,
    common,
    lists,
    operand_parameters,
    prepare,
    strides,
)
from attn_compiler.lowerings.shared.calls.forward_call import Forward
from attn_compiler.lowerings.shared.calls.leaf_calls import ForwardArguments, Outputs
from attn_compiler.lowerings.shared.kernels.forward import attention_again
from attn_compiler.lowerings.shared.kernels.tuples import MaskStrides, Sizes, Strides
from attn_compiler.lowerings.shared.launching import persistent
from attn_compiler.lowerings.shared.launching.launch import Arguments, ReadyKernel, launch
from attn_compiler.lowerings.shared.launching.replaying import CallCache

#: rows that a program searches for marked ones
_TOGETHER = 1024
_HALF_VECTOR = 8

#: Parameters that are read by whole heads, or by a number for each position or block: no vector depends on the lengths. Compiled for sm90
#: (Triton 3.7.1; padded, causal, D 128), Hopper's kernels for both classes differ by 8 of 7344 and of 5536 instructions.
_BY_LENGTH = frozenset(
    "Q K V Out Lse GradOut GradLse GradQ GradK GradV Each Grad Sums RowStats Lists Tiles Ranks Turns Flag Wanted Keys Rows DocumentsQ "
    "DocumentsK Sinks Slopes".split()
)


def own_arguments(*, tensors: Mapping[str, str | None], **given: Any) -> Arguments:
    """Return the arguments of a kernel of this family, without classes of lengths where no vector that it reads depends on these."""
    taken = {parameter for parameter, name in tensors.items() if name is not None}
    return Arguments(tensors=tensors, classes=not taken <= _BY_LENGTH, **given)


def operands_of(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the leaf op's operands, in order."""
    further = {mask_bits.NAME: mask_bits.is_there(prepared.plan), added.NAME: added.is_there(prepared.plan)}
    own = (name for name, here in further.items() if here)
    return (*(name for name in prepared.operands if name != "tiles_by_key"), *own)


def kernel_of(prepared: Prepared) -> Any:
    """Return the kernel that takes a call's head dims."""
    wide = forward_wide_sm90.attention_forward_wide_sm90
    return wide if is_wide(prepared.call.spec) else forward_sm90.attention_forward_sm90


def _run(prepared: Prepared, same: CallCache, tensors: Named) -> list[ReadyKernel | None]:
    ran = [launch(kernel_of(prepared), same, tensors, lambda: _forward(prepared, tensors))]
    if same.fact("again", lambda: _comes_again(prepared, tensors["Q"], tensors["K"])):
        ran.append(launch(attention_again, same, tensors, lambda: _again(prepared, tensors)))
    return ran


@dataclass(frozen=True, kw_only=True, slots=True)
class _Forward(Forward):
    """The forward, which copies the added tensor first where the copy engine can't read it."""

    def first(self, given: ForwardArguments, same: CallCache) -> Outputs:
        if added.begins_between_vectors(prepare(given.text).plan, given.operands):
            return self(*given._replace(operands=added.with_copy(given.operands)))
        return Forward.first(self, given, same)


forward = _Forward(op="hopper", operands=operands_of, run=_run)

#: `forward` for one place in compiled code
ForwardSite = functools.partial(leaf_calls.ForwardSite, forward)


def may_leak(prepared: Prepared, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether a tile may hold keys that no query of its block uses: their values may be NaN, and 0 · NaN is NaN.

    Under a causal mask with as many keys as queries, each key is used by its own query and by all later ones.
    """
    plan = prepared.plan
    if plan.tiles or plan.unlisted:
        return True
    band = plan.band
    if band is None:
        return False
    is_diagonal = band.left is None and band.right == 0
    return not (is_diagonal and q.shape[2] == k.shape[2])


def _comes_again(prepared: Prepared, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether rows may be marked to be recomputed."""
    return may_leak(prepared, q, k) or (prepared.plan.bias and prepared.call.spec.adds_unread)


def _forward(prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> Arguments:
    q, k, v = tensors["Q"], tensors["K"], tensors["V"]
    blocks = blocks_of(prepared.call.spec)
    every = common(prepared, tensors)
    in_head, heads_of_all = triton.cdiv(q.shape[2], blocks.queries), q.shape[0] * q.shape[1]
    reach = persistent.reach(every)
    differ = every["HAS_RIGHT"] or is_ordered(prepared.call.spec)
    section = persistent.section(k, v, heads_q=q.shape[1], reach=reach) if differ else 1
    numbers = {
        **every,
        **lists(tensors.get("tiles")),
        **{f"stride_{name.lower()}": bhsd_strides(tensors[name]) for name in "QKV"},
        "stride_o": bhsd_strides(tensors["Out"]),
        "section": section,
        "blocks": in_head,
        "heads_of_all": heads_of_all,
        "adding": adding_of(tensors),
        "masking": masking_of(every["masking"], tensors.get(mask_bits.NAME)),
        "HOW": switches(prepared, every, blocks, leaks=may_leak(prepared, q, k), further=tensors.get(added.NAME)),
    }
    wanted = {*kernel_of(prepared).arg_names, *Sizes._fields}
    given = {**operand_parameters(prepared), "Sinks": prepared.present("sinks"), "Lists": prepared.present("tiles")}
    given |= {
        parameter: name if name in tensors else None
        for parameter, name in (("Added", added.NAME), ("Bits", mask_bits.NAME))
    }
    return own_arguments(
        grid=persistent.programs(in_head * heads_of_all, q.device),
        tensors={name: name for name in ("Q", "K", "V", "Out", "Lse")}
        | {name: source for name, source in given.items() if name in wanted},
        numbers={name: x for name, x in numbers.items() if name in wanted},
        tile=blocks.tile,
    )


def masking_of(masking: MaskStrides, bits: torch.Tensor | None, *, by_key: bool = False) -> MaskStrides:
    """Replace the mask's strides by those of its bits, or of its bits by key, if it has such bits."""
    if bits is None:
        return masking
    b, h, row = (along(bits, axis) for axis in range(3))
    return masking._replace(mask_b=b, mask_h=h, mask_q=0 if by_key else row, mask_k=row if by_key else 0)


def adding_of(tensors: Mapping[str, torch.Tensor]) -> Adding | None:
    further = tensors.get(added.NAME)
    if further is None:
        return None
    batches, heads, rows, columns = further.shape
    at = bhsd_strides(further)
    sizes = {"batches": batches, "heads": heads, "rows": rows, "columns": columns}
    return Adding(**sizes, stride_b=at.b, stride_h=at.h, stride_q=at.s, zero=added.zero(tensors["Q"].shape[2]))


def of_all(prepared: Prepared, numbers: Mapping[str, Any], *, leaks: bool) -> dict[str, Any]:
    """Return the compile-time switches that the kernels of both passes have. numbers: `arguments.common`."""
    spec = prepared.call.spec
    given = {name: numbers[name] for name in ("HEAD_DIM_QK", "HEAD_DIM_V", "HAS_LEFT", "HAS_RIGHT", "MASK_ALL")}
    return {**given, "SOFTCAP": spec.score.softcap is not None, "MARKS": leaks, "ORDERED": is_ordered(spec)}


def switches(
    prepared: Prepared,
    numbers: Mapping[str, Any],
    blocks: ForwardBlocks,
    *,
    leaks: bool,
    further: torch.Tensor | None = None,
) -> ForwardSwitches:
    """Return the kernel's compile-time switches. numbers: `arguments.common`. further: the added tensor that the copy engine reads.

    Batch rows that share a bias read it one after the other: from memory once, and from the L2 cache after that.
    """
    qk, v = multiplied(prepared.call.spec)
    is_shared = further is not None and prepared.plan.bias and further.shape[0] == 1 < further.shape[1]
    return ForwardSwitches(
        **of_all(prepared, numbers, leaks=leaks),
        QK_ALL=qk,
        V_ALL=v,
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        STAGES=blocks.stages,
        QUERY_STAGES=blocks.query_stages,
        CONSUMERS=blocks.consumers,
        REGISTERS=blocks.registers,
        OUT_IN_Q=leaves_from_queries(prepared.call.spec, 0 if further is None else further.element_size()),
        OVERLAPS=blocks.overlaps,
        TURNS=blocks.takes_turns,
        ADDED_STAGES=0 if further is None else blocks.added_stages,
        ADDED_EARLY=further is not None and blocks.reads_early(further.element_size()),
        BY_DISTANCE=prepared.plan.distances,
        BATCH_LAST=is_shared,
        PART=blocks.part,
        TILE=blocks.keys,
        LOW_AGAIN=prepared.plan.bias and prepared.call.spec.adds_unread,
    )


def bhsd_strides(tensor: torch.Tensor) -> Strides:
    """Return strides of batch, heads and positions of a logical BHSD tensor. An axis of size 1 gets a multiple of a vector; no stride of it
    is used."""
    b, h, s = (
        _HALF_VECTOR if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride()[:3], strict=False)
    )
    return Strides(b=b, h=h, s=s)


def _again(prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> Arguments:
    """Arguments of the kernel that recomputes marked rows. It masks every tile: its blocks have no lists, and such rows are few."""
    tile, q = prepared.call.tiles.forward, tensors["Q"]
    together = _TOGETHER // tile.queries
    numbers = {**common(prepared, tensors), **lists(None), **strides("o", tensors["Out"]), "MASK_ALL": True}
    return Arguments(
        grid=(triton.cdiv(q.shape[2], _TOGETHER) * q.shape[0] * q.shape[1], 1, 1),
        tensors={
            **{name: name for name in ("Q", "K", "V", "Out", "Lse")},
            "Tiles": None,
            "Sinks": prepared.present("sinks"),
            **operand_parameters(prepared),
        },
        numbers=numbers | {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "TOGETHER": together},
        tile=tile,
    )
