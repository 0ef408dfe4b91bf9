"""As compiling_fp8.py, for the kernels that round: python -m tests.lowerings.kernels.compiling_round_fp8"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from attn_compiler.lowerings import fp8_rounding_launch
from attn_compiler.lowerings.fp8_rounding import How, Rounding, empty_outputs
from attn_compiler.lowerings.kernels import round_fp8
from attn_compiler.lowerings.launching import Arguments
from tests.lowerings.kernels.compiling import resources

_TYPES = {torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv", torch.float32: "*fp32", torch.int32: "*i32"}
HEAD_DIMS = (64, 128, 256)
TENSORS = 3


@dataclass(frozen=True, kw_only=True)
class Found:
    """spilled: bytes of a thread's stack. loads, stores: the widest of global memory, in PTX."""

    name: str
    spilled: int
    loads: str
    stores: str


def run(head_dim: int) -> list[Found]:
    """Of both kernels, for q, k and v that lie as (B, S, H, D)."""
    x = [torch.empty(2, 512, 16, head_dim, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(TENSORS)]
    each = tuple(How(format="e4m3", turned=i == TENSORS - 1, restore="bfloat16") for i in range(TENSORS))
    how = Rounding(each=each, block=128)
    named = fp8_rounding_launch._named(x, None)
    rounding = dict(named)
    for i, one in enumerate(x):
        names = ("rounded", "descale", "restored")
        outputs = empty_outputs(one, None, each[i], how.block)
        rounding |= {f"{name}{i}": tensor for name, tensor in zip(names, outputs, strict=True)}
    looking = named | {"kept": torch.empty(TENSORS, dtype=torch.int32, device="meta")}
    return [
        _compiled(
            f"round {head_dim}", round_fp8.round_fp8, fp8_rounding_launch._rounding(rounding, how, TENSORS), rounding
        ),
        _compiled(
            f"look {head_dim}", round_fp8.largest_fp8, fp8_rounding_launch._looking(looking, how, TENSORS), looking
        ),
    ]


def _compiled(name: str, kernel: Any, arguments: Arguments, tensors: dict[str, torch.Tensor]) -> Found:
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(kernel.params):
        source = arguments.tensors.get(parameter.name)
        value = arguments.numbers.get(parameter.name)
        if source is not None:
            signature[parameter.name] = _TYPES[tensors[source].dtype]
        elif isinstance(value, float) and not parameter.is_constexpr:
            signature[parameter.name] = "fp32"
        elif value is None or parameter.is_constexpr or value == 1:
            signature[parameter.name] = "constexpr"
            constants[i,] = value
        else:
            signature[parameter.name] = "i32"
        if source is not None or (signature[parameter.name] == "i32" and value is not None and value % 16 == 0):
            attributes[i,] = [["tt.divisibility", 16]]
    source_of = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {} if arguments.tile is None else arguments.tile.launch_options
    compiled = compile_kernel(source_of, target=GPUTarget("cuda", 90, 32), options=options)
    _, spilled = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    widest = {kind: max(re.findall(rf"{kind}\.global(\.v\d)?", ptx), default="") for kind in ("ld", "st")}
    return Found(name=name, spilled=spilled, loads=widest["ld"], stores=widest["st"])


def main() -> None:
    json.dump([asdict(found) for head_dim in HEAD_DIMS for found in run(head_dim)], sys.stdout)


if __name__ == "__main__":
    main()
