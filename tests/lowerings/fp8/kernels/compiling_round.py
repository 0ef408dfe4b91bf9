"""As triton/kernels/compiling.py, for the kernels that round: python -m tests.lowerings.fp8.kernels.compiling_round"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_compiler.lowerings.fp8 import rounding_launch
from attn_compiler.lowerings.fp8.kernels import mean_fp8, round_fp8
from attn_compiler.lowerings.fp8.rounding import How, Rounding, empty_outputs, empty_shift
from attn_compiler.lowerings.shared.launching.launch import Arguments
from tests.lowerings.triton.kernels.compiling import compiled_for, resources, say, source

HEAD_DIMS = (64, 128, 256)
TENSORS = 3


@dataclass(frozen=True, kw_only=True)
class Found:
    """spilled: bytes of a thread's stack. loads, stores: the widest of global memory, in PTX. shared: bytes of shared memory.
    on_tensor_cores: products. repacked: registers of FP8 that are packed, and taken apart again."""

    name: str
    spilled: int
    loads: str
    stores: str
    shared: int
    on_tensor_cores: int
    repacked: int


#: what is rounded: v for a backward, too; for the accurate recipe; for that beneath a softcap; and in FP8 there; and of all of these
#: the two first with keys that nobody sees
KINDS = ("plain", "accurate", "accurate, shift", "shift", "plain, seen", "accurate, seen")


def run(head_dim: int) -> list[Found]:
    """Of all kernels, for q, k and v that lie as (B, S, H, D)."""
    x = [torch.empty(2, 512, 16, head_dim, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(TENSORS)]
    found = [each for kind in KINDS for each in _rounding(kind, head_dim, x)]
    sums = {"x": x[0], "sums": torch.empty(2, 16, 1, head_dim, device="meta")}
    mean = sums | {"mean": torch.empty(2, 16, 2, head_dim, device="meta")}
    summing, adding = rounding_launch._summing(x[0], 1), rounding_launch._adding(x[0], 1, True)
    found.append(_compiled(f"sums {head_dim}", mean_fp8.sums_fp8, summing, sums))
    return [*found, _compiled(f"mean {head_dim}", mean_fp8.mean_fp8, adding, mean)]


def _how(kind: str) -> Rounding:
    q, k = How(format="e4m3"), How(format="e4m3")
    if kind == "shift":
        q, k = How(format="e4m3", rotated=True, has_shift=True), How(format="e4m3", rotated=True, has_mean=True)
    elif not kind.startswith("plain"):
        q = How(format="int8", rotated=True, has_shift="shift" in kind)
        k = How(format="int8", rotated=True, has_mean=True)
    v = How(format="e4m3", turned=True, restore="" if kind == "shift" else "bfloat16")
    if "seen" in kind:
        k, v = (replace(one, of_keys=True) for one in (k, v))
    return Rounding(each=(q, k, v), block=128)


def _rounding(kind: str, head_dim: int, x: list[torch.Tensor]) -> list[Found]:
    """Of what rounds and what looks for magnitudes."""
    how = _how(kind)
    mean = None if kind.startswith("plain") else torch.empty(2, 16, 2, head_dim, device="meta")
    seen = torch.empty(2, 512, dtype=torch.bool, device="meta") if "seen" in kind else None
    named = rounding_launch._named(x, mean, seen)
    rounding = dict(named)
    for i, one in enumerate(x):
        outputs = zip(("rounded", "descale", "restored"), empty_outputs(one, None, how.each[i], how.block), strict=True)
        rounding |= {f"{name}{i}": tensor for name, tensor in outputs if tensor.numel()}
    rounding |= {} if "shift" not in kind else {"shift": empty_shift(x, how)[0]}
    looking = named | {"kept": torch.empty(TENSORS, dtype=torch.int32, device="meta")}
    rounds, looks = (f"{which} {kind} {head_dim}" for which in ("round", "look"))
    of_rounding = rounding_launch._rounding(rounding, how, TENSORS)
    of_looking = rounding_launch._looking(looking, how, TENSORS)
    return [
        _compiled(rounds, round_fp8.round_fp8, of_rounding, rounding),
        _compiled(looks, round_fp8.largest_fp8, of_looking, looking),
    ]


def _compiled(name: str, kernel: Any, arguments: Arguments, tensors: dict[str, torch.Tensor]) -> Found:
    given = {parameter: None if key is None else tensors[key] for parameter, key in arguments.tensors.items()}
    source_of = source(kernel, {**given, **arguments.numbers})
    options = {} if arguments.tile is None else arguments.tile.launch_options
    compiled = compiled_for(source_of, options)
    _, spilled = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    packed = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%\w+)", ptx))
    widest = {kind: max(re.findall(rf"{kind}\.global(\.v\d)?", ptx), default="") for kind in ("ld", "st")}
    return Found(
        name=name,
        spilled=spilled,
        loads=widest["ld"],
        stores=widest["st"],
        shared=compiled.metadata.shared,
        on_tensor_cores=ptx.count("wgmma.mma_async"),
        repacked=len(packed.intersection(re.findall(r"cvt\.rn\.f16x2\.e4m3x2\s+%\w+,\s*(%\w+)", ptx))),
    )


if __name__ == "__main__":
    say(run, HEAD_DIMS)
