"""As compiling.py, for the FP8 forward: python -m tests.lowerings.triton.kernels.compiling_fp8"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel

from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.limits.triton_releases import FUSION
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.triton import fp8_launch
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from attn_compiler.spec.target import Target
from tests.lowerings.fp8 import problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import planned
from tests.lowerings.triton.kernels.compiling import resources, source

_SIZES: Any = {"batch": 1, "heads_q": 2, "heads_kv": 1, "seqlen_q": 1024, "seqlen_kv": 1024, "band": Band(right=0)}
CASES = {
    case.name: case
    for case in (
        Case(name="causal_64", head_dim=64, **_SIZES),
        Case(name="causal_128", head_dim=128, **_SIZES),
        Case(name="causal_256", head_dim=256, **_SIZES),
        Case(name="few_128", head_dim=128, batch=1, seqlen_q=8, seqlen_kv=1024),
        Case(name="keys_softcap_128", head_dim=128, keys="left", softcap=30.0, **_SIZES),
        Case(name="documents_128", head_dim=128, documents=True, **_SIZES),
        Case(name="rows_64", head_dim=64, rows=True, **_SIZES),
    )
}
RECIPES = {
    "head": Fp8Recipe(),
    "accurate": Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
}

#: (case, recipe, sm)
JOBS = (
    *((name, "head", sm) for name in ("causal_64", "causal_128") for sm in (90, 100)),
    ("causal_256", "head", 90),
    ("few_128", "head", 90),
    ("causal_128", "accurate", 90),
    ("keys_softcap_128", "accurate", 90),
    ("documents_128", "head", 90),
    ("rows_64", "head", 90),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """registers, spilled (bytes of a thread's stack), shared (bytes); instructions: tensor core instructions of the PTX."""

    case: str
    recipe: str
    sm: int
    registers: int
    spilled: int
    shared: int
    instructions: list[str]


def run(job: tuple[str, str, int]) -> Found:
    name, recipe, sm = job
    given = problems.build(CASES[name], RECIPES[recipe], dtype=torch.bfloat16, device="cpu", target=Target.fake(sm=sm))
    found: list[tuple[Any, dict[str, Any], dict[str, int]]] = []

    def record(kernel: Any, same: Any, tensors: Mapping[str, Any], arguments: Callable[[], Arguments]) -> None:
        asked = arguments()
        values = {parameter: None if name is None else tensors[name] for parameter, name in asked.tensors.items()}
        options = {} if asked.tile is None else asked.tile.launch_options
        found.append((kernel, {**values, **asked.numbers}, options))

    problem = given.problem
    with planned(problem.plan), mock.patch.object(fp8_launch, "launch", record), torch.no_grad():
        fp8_launch.forward(problem.q, problem.k, problem.v, given.operands, problem.text)
    ((kernel, values, options),) = found
    compiled = compile_kernel(source(kernel, values), target=GPUTarget("cuda", sm, 32), options={**options, **FUSION})
    registers, spilled = resources(compiled.asm["cubin"])
    pattern = r"(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*"
    return Found(
        case=name,
        recipe=recipe,
        sm=sm,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        instructions=sorted(set(re.findall(pattern, compiled.asm["ptx"]))),
    )


def main() -> None:
    with ProcessPoolExecutor(max_workers=2) as pool:
        json.dump([asdict(found) for found in pool.map(run, JOBS)], sys.stdout)


if __name__ == "__main__":
    main()
