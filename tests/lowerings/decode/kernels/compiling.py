"""As compiling.py, the decode kernel: run as a program, in a process without the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton.compiler import ASTSource

from attn_compiler.lowerings.decode import launch, replaying, schedule as decode_schedule
from attn_compiler.spec.target import Target
from tests.lowerings.decode.problems import Case, build, results
from tests.lowerings.triton.kernels.compiling import POINTERS, compiled_for, resources, say

_SIZES: Any = {"batch": 2, "heads_q": 8, "heads_kv": 2, "seqlen_kv": 512}
_SHAPES = (
    Case(name="head_dim_64", head_dim=64, **_SIZES),
    Case(name="head_dim_128", head_dim=128, bounds=((0, 300),), **_SIZES),
)
_FURTHER = (
    Case(name="head_dim_80", head_dim=80, **_SIZES),
    Case(name="head_dim_256", head_dim=256, softcap=30.0, **_SIZES),
    Case(name="head_dims_192_128", head_dim=192, head_dim_v=128, **_SIZES),
    Case(name="keys_sinks", head_dim=64, keys="left", bounds=((0, 300),), sinks=True, **_SIZES),
    Case(name="fp8", head_dim=128, bounds=((0, 300),), stored="float8_e4m3fn", k_scale=0.5, v_scale=0.5, **_SIZES),
    Case(name="queries", head_dim=128, seqlen_q=16, bounds=((0, 300),), mask="bqk", **_SIZES),
)
_WIDE = (
    Case(name="head_dim_512", head_dim=512, bounds=((0, 300),), keys="left", sinks=True, **_SIZES),
    Case(name="rows_512", head_dim=512, heads_q=32, heads_kv=1, batch=2, seqlen_kv=512),
)
CASES = {case.name: case for case in (*_SHAPES, *_FURTHER, *_WIDE)}
_POINTERS = {torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5"}
MACHINES = (80, 90, 100, 120)
_WIDE_MACHINES = (80, 89, 90, 100, 120)

#: (case, sm)
JOBS = (
    *((case.name, sm) for case in _SHAPES for sm in MACHINES),
    *((case.name, 90) for case in _FURTHER),
    *((case.name, sm) for case in _WIDE for sm in _WIDE_MACHINES),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """registers, spilled (bytes of a thread's stack), shared (bytes); of the PTX, instructions of tensor cores, asynchronous copies, and
    those that load or convert a single number."""

    case: str
    sm: int
    registers: int
    spilled: int
    shared: int
    mma: int
    copies: int
    singles: int


def run(job: tuple[str, int]) -> Found:
    name, sm = job
    problem = build(CASES[name], dtype=torch.bfloat16, device="cpu")
    schedule = decode_schedule.table(problem.spec, Target.fake(sm=sm))
    problem = build(CASES[name], dtype=torch.bfloat16, device="cpu", schedule=schedule)
    values: dict[str, Any] = {}

    def record(
        _: Any, kernel: Any, key: Any, grid: Any, tensors: Any, numbers: Any, how: Any, *__: Any, **___: Any
    ) -> None:
        values.update(zip(kernel.arg_names, (*tensors, *numbers), strict=False))
        values.update(HOW=how())

    with mock.patch.object(replaying, "launch", record):
        results(problem)
    options = {"num_warps": schedule.warps, "num_stages": schedule.stages}
    source = source_of(launch.attention_decode, values)
    compiled = compiled_for(source, options, sm)
    registers, spilled = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Found(
        case=name,
        sm=sm,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        mma=ptx.count("mma.sync") + ptx.count("wgmma.mma_async") + ptx.count("tcgen05.mma"),
        copies=ptx.count("cp.async.cg"),
        singles=ptx.count("ld.shared.b8") + ptx.count("cvt.bf16.f16"),
    )


def source_of(function: Any, values: Mapping[str, Any], kind: type[ASTSource] = ASTSource) -> ASTSource:
    """As a launch sees its arguments: only what the kernel may be compiled for says anything but its type."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(function.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = {**POINTERS, **_POINTERS}[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type
    return kind(fn=function, signature=signature, constexprs=constants, attrs=attributes)


if __name__ == "__main__":
    say(run, JOBS)
