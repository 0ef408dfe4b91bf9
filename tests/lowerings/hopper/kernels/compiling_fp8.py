"""As triton/kernels/compiling.py, for the FP8 kernel in Gluon: python -m tests.lowerings.hopper.kernels.compiling_fp8"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attn_compiler.lowerings.hopper import fp8_launch
from attn_compiler.lowerings.hopper.kernels.forward_fp8_sm90 import attention_forward_fp8_sm90
from attn_compiler.lowerings.hopper.kernels.fp8_tuples import Fp8Switches
from attn_compiler.lowerings.shared.kernels.tuples import DescaleStrides
from tests.lowerings.fp8.kernels.descriptors import unset
from tests.lowerings.triton.kernels.compiling import compiled_for, resources, said_of, say

_TYPES = {"scale": "fp32", "softcap": "fp32", "Sinks": "*bf16", "Ends": "*i32"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """given: constants that differ from those of causal attention with one scale for a head. present: optional tensors."""

    name: str
    head_dim: int
    qk: str = "fp8e4nv"
    v: str = "fp8e4nv"
    given: dict[str, Any] = field(default_factory=dict)
    present: tuple[str, ...] = ()


JOBS = (
    Job(name="blocks_64", head_dim=64, given={"SCALE_BLOCK": 128}),
    Job(name="full_64", head_dim=64, given={"HAS_RIGHT": False}),
    Job(name="causal_128", head_dim=128),
    Job(name="causal_64", head_dim=64),
    Job(name="full_128", head_dim=128, given={"HAS_RIGHT": False}),
    Job(name="blocks_128", head_dim=128, given={"SCALE_BLOCK": 128}),
    Job(name="int8_64", head_dim=64, qk="i8", given={"SCALE_BLOCK": 128}, present=("Shift",)),
    Job(name="e5m2_64", head_dim=64, qk="fp8e5", v="fp8e5"),
    Job(name="softcap_sinks_64", head_dim=64, given={"SOFTCAP": True}, present=("Sinks",)),
    Job(name="window_64", head_dim=64, given={"HAS_LEFT": True, "SCALE_BLOCK": 128}),
    Job(name="lengths_64", head_dim=64, given={"SCALE_BLOCK": 128}, present=("Ends",)),
    Job(name="window_128", head_dim=128, given={"HAS_LEFT": True, "SCALE_BLOCK": 128}),
    Job(name="lengths_full_128", head_dim=128, given={"HAS_RIGHT": False}, present=("Ends",)),
    Job(name="left_128", head_dim=128, given={"HAS_LEFT": True, "HAS_RIGHT": False}),
    Job(name="window_softcap_sinks_64", head_dim=64, given={"HAS_LEFT": True, "SOFTCAP": True}, present=("Sinks",)),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """spilled: bytes of a thread's stack. shared: bytes. instructions: of the tensor cores, in PTX. unset: `descriptors.unset`."""

    name: str
    spilled: int
    shared: int
    instructions: list[str]
    unset: list[str]


def _descriptor(dtype: str, tile: list[int]) -> str:
    element: Any = {"bf16": gl.bfloat16, "i8": gl.int8, "fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5}[dtype]
    return f"tensordesc<{dtype}{tile},{gl.NVMMASharedLayout.get_default_for(tile, element)!r}>"


def run(job: Job) -> Found:
    d, keys = job.head_dim, fp8_launch.KEYS
    warpgroups = fp8_launch.WARPGROUPS[d]
    switches: dict[str, Any] = {
        "HEAD_DIM_QK": d,
        "HEAD_DIM_V": d,
        "STAGES": fp8_launch.STAGES,
        "SCALE_BLOCK": 0,
        "HAS_LEFT": False,
        "HAS_RIGHT": True,
        "SOFTCAP": False,
        "CONSUMERS": warpgroups.count,
        "REGISTERS": warpgroups.registers,
    }
    constants: dict[str, Any] = {"HOW": Fp8Switches(**(switches | job.given))}
    constants |= {name: None for name in ("Shift", "Sinks", "Ends") if name not in job.present}
    descriptors = {
        "Q": _descriptor(job.qk, [1, 1, 64, d]),
        "K": _descriptor(job.qk, [1, 1, keys, d]),
        "V": _descriptor(job.v, [1, 1, d, keys]),
        "Out": _descriptor("bf16", [1, 1, 64, d]),
    }
    names = [parameter.name for parameter in attention_forward_fp8_sm90.params]
    signature = {name: _type(name, constants, descriptors) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn=attention_forward_fp8_sm90, signature=signature, constexprs=values)
    compiled = compiled_for(source, {"num_warps": 4})
    _, spilled = resources(compiled.asm["cubin"])
    found = sorted(set(re.findall(r"wgmma\.mma_async[\w.:]*", compiled.asm["ptx"])))
    return Found(
        name=job.name,
        spilled=spilled,
        shared=compiled.metadata.shared,
        instructions=found,
        unset=unset(said_of(compiled.asm["cubin"], "-sass")),
    )


def _type(name: str, constants: dict[str, Any], descriptors: dict[str, str]) -> Any:
    if name == "stride_descales":
        return DescaleStrides(*["i32"] * len(DescaleStrides._fields))
    if name in constants:
        return "constexpr"
    return descriptors.get(name) or _TYPES.get(name) or ("*fp32" if name[0].isupper() else "i32")


if __name__ == "__main__":
    say(run, JOBS)
