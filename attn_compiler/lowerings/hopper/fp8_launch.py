"""Launches of Hopper's FP8 kernel. Imports triton, so it is imported late."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.fp8 import quantise, restoring
from attn_compiler.lowerings.hopper.kernels import forward_fp8_sm90
from attn_compiler.lowerings.hopper.kernels.fp8_tuples import Fp8Switches
from attn_compiler.lowerings.shared.calls import leaf_calls
from attn_compiler.lowerings.shared.calls.arguments import Named, Prepared, along, common
from attn_compiler.lowerings.shared.calls.forward_call import Forward
from attn_compiler.lowerings.shared.kernels import tiles_sm90
from attn_compiler.lowerings.shared.kernels.tuples import DescaleStrides
from attn_compiler.lowerings.shared.launching import persistent
from attn_compiler.lowerings.shared.launching.launch import Arguments, Make, ReadyKernel, launch
from attn_compiler.lowerings.shared.launching.replaying import CallCache
from attn_compiler.lowerings.shared.parts.kernel_plan import head_dim_tiles
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.dtypes import HALF, HALVES

STAGES = 3
#: queries and keys that a warpgroup multiplies at once
_ROWS: int = tiles_sm90.ROWS.value
KEYS: int = tiles_sm90.KEYS.value
_WARPS = 4

_ELEMENTS = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.int8: gl.int8,
    **{dtype: getattr(gl, name) for name, dtype in zip(HALF, HALVES, strict=True)},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Warpgroups:
    """Number of warpgroups that compute, and registers of each of their threads: all that the others leave."""

    count: int
    registers: int


#: by the largest head dim that each entry supports
WARPGROUPS = {64: Warpgroups(count=4, registers=112), 128: Warpgroups(count=3, registers=160)}


def _run(prepared: Prepared, same: CallCache, tensors: Named) -> list[ReadyKernel | None]:
    if not tensors["Out"].numel():
        return [None]
    kernel = forward_fp8_sm90.attention_forward_fp8_sm90
    return [launch(kernel, same, tensors, lambda: _arguments(prepared, tensors))]


forward = Forward(
    op="hopper_fp8",
    operands=lambda prepared: (*quantise.names(prepared.call.spec), *prepared.operands),
    run=_run,
    restore=lambda prepared, tensors: restoring.exact(prepared.call.spec, tensors),
)

#: `forward` for one place in compiled code
ForwardSite = functools.partial(leaf_calls.ForwardSite, forward)


def _arguments(prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> Arguments:
    spec = prepared.call.spec
    qk, v = head_dim_tiles(spec)
    tiles = {"Q": ("q8", [1, 1, _ROWS, qk]), "K": ("k8", [1, 1, KEYS, qk]), "V": ("v8", [1, 1, v, KEYS])}
    tiles["Out"] = ("Out", [1, 1, _ROWS, v])
    made: dict[str, tuple[str, Make]] = {
        parameter: (name, functools.partial(_descriptor, tile=tile)) for parameter, (name, tile) in tiles.items()
    }
    named = {"Lse": "Lse", "Shift": "shift", "Sinks": "sinks"}
    named |= {f"Descale{name.upper()}": f"descale_{name}" for name in "qkv"}
    given = {parameter: name if name in tensors else None for parameter, name in named.items()}
    if "rows" in tensors:
        # One after the last key of each query.
        made["Ends"] = ("rows", lambda rows: rows[1])
    else:
        given["Ends"] = None
    return Arguments(
        grid=persistent.programs(
            _blocks(spec, tensors["q8"]) * math.prod(tensors["q8"].shape[:2]), tensors["q8"].device
        ),
        tensors=given,
        numbers=_numbers(prepared, tensors),
        tile=Tile(queries=_ROWS * warpgroups(spec).count, keys=KEYS, warps=_WARPS, stages=STAGES),
        made=made,
    )


def _blocks(spec: AttentionSpec, q: torch.Tensor) -> int:
    found: int = triton.cdiv(q.shape[2], _ROWS * warpgroups(spec).count)
    return found


def _descriptor(tensor: torch.Tensor, tile: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, tile, _layout(tuple(tile), tensor.dtype))


@functools.cache
def _layout(tile: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(tile), _ELEMENTS[dtype])


def warpgroups(spec: AttentionSpec) -> Warpgroups:
    """Return the most warpgroups that fit: while one waits for its products, others compute."""
    widest = max(head_dim_tiles(spec))
    return next(found for limit, found in sorted(WARPGROUPS.items()) if widest <= limit)


def _numbers(prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments of the kernel that are no tensors, by parameter."""
    spec = prepared.call.spec
    every = common(prepared, {**tensors, "Q": tensors["q8"], "K": tensors["k8"], "V": tensors["v8"]})
    qk, v = head_dim_tiles(spec)
    section = 1
    if every["HAS_RIGHT"]:
        reach, heads_q = persistent.reach(every), tensors["q8"].shape[1]
        section = persistent.section(tensors["k8"], tensors["v8"], heads_q=heads_q, reach=reach)
    found: dict[str, Any] = {
        "blocks": _blocks(spec, tensors["q8"]),
        "heads_of_all": tensors["q8"].shape[0] * tensors["q8"].shape[1],
        "rows_b": every["masking"].rows_b,
        "softcap": spec.score.softcap or 1.0,
        "section": section,
        "HOW": Fp8Switches(
            HEAD_DIM_QK=qk,
            HEAD_DIM_V=v,
            STAGES=STAGES,
            SCALE_BLOCK=quantise.scales_of(spec).block or 0,
            HAS_LEFT=every["HAS_LEFT"],
            HAS_RIGHT=every["HAS_RIGHT"],
            SOFTCAP=spec.score.softcap is not None,
            CONSUMERS=warpgroups(spec).count,
            REGISTERS=warpgroups(spec).registers,
        ),
    }
    descales = {name: tensors[f"descale_{name}"] for name in "qkv"}
    strides = {f"descale_{name}{axis}": along(x, i) for name, x in descales.items() for i, axis in enumerate("bh")}
    found["stride_descales"] = DescaleStrides(**strides)
    wanted = forward_fp8_sm90.attention_forward_fp8_sm90.arg_names
    return {name: value for name, value in (every | found).items() if name in wanted}
