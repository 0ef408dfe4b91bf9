"""Compiles the kernels for GPUs that are not there, and says what came out: python -m tests.lowerings.triton.kernels.compiling

Runs in a process of its own, since Triton's interpreter, which the other tests use, compiles nothing. Kernels, constants and
numbers are those of a launch; each is compiled for what Triton's launch would see of it: which numbers are 1 or multiples of 16.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile as compile_kernel

from attn_compiler.lowerings.shared.launching.launch import Arguments, as_taken
from attn_compiler.lowerings.shared.limits.triton_releases import FUSION
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.triton import launch
from attn_compiler.spec.target import Target
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import Problem, build, planned

KERNELS = ("forward", "grad_q", "grad_kv")
MACHINES = (80, 90, 100, 120)
#: of head dims above 256, where dk and dv have a pass each
WIDE_KERNELS = ("forward", "grad_q", "grad_k", "grad_v")
WIDE_MACHINES = (80, 89, 90, 100, 120)

_SIZES: Any = {"batch": 1, "heads_q": 2, "heads_kv": 1, "seqlen_q": 1024, "seqlen_kv": 1024, "band": Band(right=0)}
_CAUSAL = (Case(name="causal_64", head_dim=64, **_SIZES), Case(name="causal_128", head_dim=128, **_SIZES))
_FURTHER = (
    Case(name="keys_128", head_dim=128, keys="left", **_SIZES),
    Case(name="bias_128", head_dim=128, bias="hqk", **_SIZES),
    Case(name="distances_128", head_dim=128, distances=2, **_SIZES),
    Case(name="causal_80", head_dim=80, **_SIZES),
    Case(name="causal_192_128", head_dim=192, head_dim_v=128, **_SIZES),
)
# whose gradients fit into the shared memory of small machines
_SMALL = Case(name="keys_256", head_dim=256, keys="left", **_SIZES)
# the heaviest masks: with lists, and beside a band
_WIDE = Case(name="keys_512", head_dim=512, keys="left", **_SIZES)
_WIDE_FURTHER = (
    Case(name="mask_512", head_dim=512, mask="bqk", needs_grad=False, **_SIZES),
    Case(name="bias_512", head_dim=512, bias="hqk", bias_grad=False, **_SIZES),
)
CASES = {case.name: case for case in (*_CAUSAL, *_FURTHER, _SMALL, _WIDE, *_WIDE_FURTHER)}

#: what is added to the scores there, and the scores' gradients, need not cross shared memory
ADDED = ("bias_128", "distances_128")

#: (case, kernel, sm)
JOBS = (
    *((case.name, kernel, sm) for case in _CAUSAL for kernel in KERNELS for sm in MACHINES),
    *((case.name, "forward", 90) for case in _FURTHER),
    *((name, kernel, 90) for name in ADDED for kernel in ("grad_kv", "grad_q_kept")),
    *((_WIDE.name, kernel, sm) for kernel in WIDE_KERNELS for sm in WIDE_MACHINES),
    *((case.name, "forward", sm) for case in _WIDE_FURTHER for sm in (89, 90)),
    *((_SMALL.name, kernel, 89) for kernel in KERNELS),
)


def name_of(job: tuple[str, str, int]) -> str:
    return "-".join(map(str, job))


@dataclass(frozen=True, kw_only=True)
class Found:
    """registers, spilled (bytes of a thread's stack), shared (bytes); counts of tensor core instructions in the PTX; of Hopper's in the
    machine code, products, waits for them and stores to shared memory."""

    case: str
    kernel: str
    sm: int
    registers: int
    spilled: int
    shared: int
    mma: int
    wgmma: int
    tcgen05: int
    products: int
    waits: int
    shared_stores: int


def run(job: tuple[str, str, int]) -> Found:
    name, kernel, sm = job
    problem = build(CASES[name], dtype=torch.bfloat16, device="cpu", target=Target.fake(sm=sm))
    function, values, options = _launch_of(problem, f"attention_{kernel}")
    compiled = compiled_for(source(function, values), options, sm)
    ptx = compiled.asm["ptx"]
    registers, spilled = resources(compiled.asm["cubin"])
    code = said_of(compiled.asm["cubin"], "-sass") if sm == 90 else ""
    return Found(
        case=name,
        kernel=kernel,
        sm=sm,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        mma=ptx.count("mma.sync"),
        wgmma=ptx.count("wgmma.mma_async"),
        tcgen05=ptx.count("tcgen05.mma"),
        products=code.count("HGMMA"),
        waits=code.count("WARPGROUP.DEPBAR"),
        shared_stores=len(re.findall(r"\bST(S|SM)\b", code)),
    )


def _launch_of(problem: Problem, name: str) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """The kernel, its arguments by name and its options, as they are launched."""
    found: dict[str, Any] = {}

    def record(
        kernel: Any, same: Any, tensors: Mapping[str, Any], arguments: Callable[[], Arguments], part: str = ""
    ) -> None:
        asked = arguments()
        if asked.tile is not None:
            options = asked.tile.launch_options
            given = {parameter: None if name is None else tensors[name] for parameter, name in asked.tensors.items()}
            launched = f"attention_grad_{part}" if part else kernel.fn.__name__
            found[launched] = (kernel, {**given, **asked.numbers}, options)

    with planned(problem.plan), mock.patch.object(launch, "launch", record), torch.no_grad():
        given = (problem.q, problem.k, problem.v, problem.operands)
        out, lse = launch.forward(*given, problem.text)
        if problem.case.needs_grad:
            launch.gradients(out, lse, *given, out, lse, problem.text)
    kernel, values, options = found[name]
    return kernel, values, options


POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*u8",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


def source(function: Any, values: Mapping[str, Any], kind: type[ASTSource] = ASTSource) -> ASTSource:
    """kind: Gluon has one of its own. values: by the names of the parameters, or of members of those that are tuples."""
    taken = as_taken(function.arg_names, values)
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(function.params):
        value = taken.get(parameter.name, parameter.default) if parameter.has_default else taken[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        else:
            signature[parameter.name] = described(value, (i,), constants, attributes)
    return kind(fn=function, signature=signature, constexprs=constants, attrs=attributes)


def described(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """The type that a launch would see of an argument, or of each member of a tuple; adds what else it would."""
    if isinstance(value, tuple):
        members = (described(member, (*path, i), constants, attributes) for i, member in enumerate(value))
        return type(value)(*members)
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32"


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack."""
    text = said_of(cubin, "--dump-resource-usage")
    registers, stack = (re.search(rf"{word}:(\d+)", text) for word in ("REG", "STACK"))
    if registers is None or stack is None:
        raise ValueError(f"cuobjdump said nothing of registers: {text}")
    return int(registers[1]), int(stack[1])


def said_of(cubin: bytes, option: str) -> str:
    """What cuobjdump says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compiled_for(source: ASTSource, options: Mapping[str, Any], sm: int = 90) -> Any:
    return compile_kernel(source, target=GPUTarget("cuda", sm, 32), options={**options, **FUSION})


def say(run: Callable[[Any], Any], jobs: Iterable[Any], name_of: Callable[[Any], str] = attrgetter("name")) -> None:
    """What came out, as JSON, of the jobs that were asked for by name, or of all."""
    names = sys.argv[1:]
    chosen = [job for job in jobs if not names or name_of(job) in names]
    with ProcessPoolExecutor(max_workers=2) as pool:
        found = [
            each for of_job in pool.map(run, chosen) for each in (of_job if isinstance(of_job, list) else [of_job])
        ]
    json.dump([asdict(each) for each in found], sys.stdout)


if __name__ == "__main__":
    say(run, JOBS, name_of)
