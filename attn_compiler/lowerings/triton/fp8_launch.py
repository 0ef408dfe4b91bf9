"""Launches of the FP8 kernel, like those of triton/launch.py. Imports triton, so it is imported late."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton

from attn_compiler.lowerings.fp8 import quantise, restoring
from attn_compiler.lowerings.shared.calls import leaf_calls
from attn_compiler.lowerings.shared.calls.arguments import (
    Named,
    Prepared,
    along,
    common,
    head_dim_parts,
    lists,
    operand_parameters,
    strides,
)
from attn_compiler.lowerings.shared.calls.forward_call import Exact, Forward
from attn_compiler.lowerings.shared.launching.launch import Arguments, ReadyKernel, launch
from attn_compiler.lowerings.shared.launching.replaying import CallCache
from attn_compiler.lowerings.triton.kernels import forward_fp8
from attn_compiler.spec.attention import AttentionSpec

#: fewest elements of a head that tensor cores multiply in FP8
_LEAST_PART = 32
#: most head dims of v whose product with one tile of keys fits into registers beside the sum: 256 spill on sm90
_WIDEST_PART = 128

#: parameters, and their names in fp8_quantise; V has positions last
_PARAMETERS = {
    "Q": "q8",
    "K": "k8",
    "V": "v8",
    "DescaleQ": "descale_q",
    "DescaleK": "descale_k",
    "DescaleV": "descale_v",
    "Shift": "shift",
}


def _operands(prepared: Prepared) -> tuple[str, ...]:
    return (*quantise.names(prepared.call.spec), *prepared.operands)


def _run(prepared: Prepared, same: CallCache, tensors: Named) -> list[ReadyKernel | None]:
    arguments = functools.partial(_arguments, prepared, tensors)
    return [launch(forward_fp8.attention_forward_fp8, same, tensors, arguments)]


def _exact(prepared: Prepared, tensors: Named) -> Exact:
    return restoring.exact(prepared.call.spec, tensors)


forward = Forward(op="triton_fp8", operands=_operands, run=_run, restore=_exact)

#: `forward` for one place in compiled code
ForwardSite = functools.partial(leaf_calls.ForwardSite, forward)


def _arguments(prepared: Prepared, tensors: Mapping[str, torch.Tensor]) -> Arguments:
    tile, q = prepared.call.tiles.forward, tensors["q8"]
    given = {parameter: tensors[name] for parameter, name in _PARAMETERS.items() if name in tensors}
    numbers = common(prepared, dict(tensors) | given) | lists(tensors.get("tiles")) | strides("o", tensors["Out"])
    numbers |= _fp8_numbers(prepared.call.spec, given) | {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys}
    names = {parameter: name if name in tensors else None for parameter, name in _PARAMETERS.items()}
    further = {"Out": "Out", "Lse": "Lse", "Tiles": prepared.present("tiles"), "Sinks": prepared.present("sinks")}
    return Arguments(
        grid=(triton.cdiv(q.shape[2], tile.queries), q.shape[1], q.shape[0]),
        tensors={**names, **further, **operand_parameters(prepared)},
        numbers=numbers,
        tile=tile,
    )


def _fp8_numbers(spec: AttentionSpec, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {"SCALE_BLOCK": quantise.scales_of(spec).block or 0}
    for name in "qkv":
        descale = given[f"Descale{name.upper()}"]
        found |= {f"descale_{name}b": along(descale, 0), f"descale_{name}h": along(descale, 1)}
    if not isinstance(spec.head_dim_qk, int) or not isinstance(spec.head_dim_v, int):
        raise TypeError(f"why_not refuses unknown head dims, got {spec.head_dim_qk!r} and {spec.head_dim_v!r}")
    found["QK_0"], found["QK_1"] = head_dim_parts(spec.head_dim_qk, least=_LEAST_PART)
    found["V_0"], found["V_1"] = parts_of_v(spec.head_dim_v)
    return found


def parts_of_v(head_dim: int) -> tuple[int, int]:
    """Return the widths of the tiles of v's products."""
    first, second = head_dim_parts(head_dim, least=_LEAST_PART)
    return (first // 2, first // 2) if first > _WIDEST_PART else (first, second)
