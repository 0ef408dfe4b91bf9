"""Calls the FP8 kernel for Hopper on tensors. Imports triton, so it comes late."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_compiler.lowerings import fp8_quantise
from attn_compiler.lowerings.kernels import forward_fp8_sm90
from attn_compiler.lowerings.launching import Alike, alike, start
from attn_compiler.lowerings.on_device import new_outputs, on
from attn_compiler.lowerings.triton_arguments import Prepared, Tensors, along, common, prepare
from attn_compiler.spec import AttentionSpec

#: queries of a program: of three warpgroups
QUERIES = 192
KEYS = 128
STAGES = 3
REGISTERS = 160
_WARPS = 4
_ROWS = 64
_LEAST_HEAD_DIM = 64
#: bytes of the L2 cache's 50 MB that keys and values may take
_CACHE = 32 * 2**20

_ELEMENTS = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.int8: gl.int8,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
}


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Tensors, text: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, as `ops.LEAF_SCHEMA` says. Of q, k and v only shapes and dtypes are read."""
    prepared = prepare(text)
    names = fp8_quantise.names(prepared.call.spec)
    same = alike(text, (q, k, v, *operands))
    tensors = dict(zip(names, operands[: len(names)], strict=True)) | prepared.named(operands[len(names) :])
    with on(q.device):
        out, lse = new_outputs(q, v)
        if out.numel():
            _launch(same, prepared, {**tensors, "out": out, "lse": lse})
    return out, lse


def _launch(same: Alike, prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> None:
    q = tensors["q8"]
    grid = (triton.cdiv(q.shape[2], QUERIES) * q.shape[1] * q.shape[0], 1, 1)
    given = _descriptors(prepared.call.spec, tensors) | _pointers(tensors)
    numbers = same.fact("numbers", lambda: _numbers(prepared, tensors))
    kernel = forward_fp8_sm90.attention_forward_fp8_sm90
    known = same.facts.get("compiled")
    if known is None:
        same.facts["compiled"] = kernel[grid](**given, **numbers, num_warps=_WARPS)
        return
    arguments = {**given, **numbers}
    start(known, grid, same.device.index, [arguments[name] for name in kernel.arg_names])


def _descriptors(spec: AttentionSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorDescriptor]:
    qk, v = head_dim_tiles(spec)
    return {
        "Q": _descriptor(tensors["q8"], [1, 1, _ROWS, qk]),
        "K": _descriptor(tensors["k8"], [1, 1, KEYS, qk]),
        "V": _descriptor(tensors["v8"], [1, 1, v, KEYS]),
        "Out": _descriptor(tensors["out"], [1, 1, _ROWS, v]),
    }


def _descriptor(tensor: torch.Tensor, tile: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, tile, _layout(tuple(tile), tensor.dtype))


@functools.cache
def _layout(tile: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(tile), _ELEMENTS[dtype])


def head_dim_tiles(spec: AttentionSpec) -> tuple[int, int]:
    """Powers of two that hold the head dims. Raises TypeError for those that are not known."""
    if not isinstance(spec.head_dim_qk, int) or not isinstance(spec.head_dim_v, int):
        raise TypeError(f"why_not refuses unknown head dims, got {spec.head_dim_qk!r} and {spec.head_dim_v!r}")
    qk, v = (max(_LEAST_HEAD_DIM, triton.next_power_of_2(d)) for d in (spec.head_dim_qk, spec.head_dim_v))
    return qk, v


def _pointers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    named = {"Lse": "lse", "Shift": "shift", "Sinks": "sinks"}
    named |= {f"Descale{name.upper()}": f"descale_{name}" for name in "qkv"}
    return {parameter: tensors.get(name) for parameter, name in named.items()}


def _numbers(prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Everything that is no tensor, by the kernel's parameters."""
    spec = prepared.call.spec
    every = common(prepared, {"Q": tensors["q8"], "K": tensors["k8"], "V": tensors["v8"]})
    qk, v = head_dim_tiles(spec)
    found = {
        "HEAD_DIM_QK": qk,
        "HEAD_DIM_V": v,
        "BLOCK_N": KEYS,
        "STAGES": STAGES,
        "SCALE_BLOCK": fp8_quantise.scales_of(spec).block or 0,
        "REGISTERS": REGISTERS,
        "blocks": triton.cdiv(tensors["q8"].shape[2], QUERIES),
        "heads_of_all": tensors["q8"].shape[0] * tensors["q8"].shape[1],
    }
    for name in "qkv":
        descale = tensors[f"descale_{name}"]
        found |= {f"descale_{name}b": along(descale, 0), f"descale_{name}h": along(descale, 1)}
    found["section"] = _section(tensors) if every["HAS_RIGHT"] and not every["HAS_LEFT"] else 1
    wanted = forward_fp8_sm90.attention_forward_fp8_sm90.arg_names
    return {name: value for name, value in (every | found).items() if name in wanted}


def _section(tensors: Mapping[str, torch.Tensor]) -> int:
    """How many heads take turns where blocks differ in length: those whose keys and values stay in the L2 cache."""
    k, v = tensors["k8"], tensors["v8"]
    of_a_head = max(k[0, 0].numel() + v[0, 0].numel(), 1)
    group = tensors["q8"].shape[1] // k.shape[1]
    return max(_CACHE // of_a_head, 1) * group
