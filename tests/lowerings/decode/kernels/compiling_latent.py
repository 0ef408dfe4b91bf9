"""As compiling.py, the kernels over a latent: run as a program, in a process without the interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from attn_compiler.lowerings.decode import latent_schedule, replaying
from attn_compiler.spec.target import Target
from tests.lowerings.decode.kernels.compiling import source_of
from tests.lowerings.decode.latent_problems import of_latent, results
from tests.lowerings.decode.problems import Case
from tests.lowerings.triton.kernels.compiling import compiled_for, resources, said_of, say

#: (heads, rank, dims beside it, sm)
JOBS = (
    *((heads, 512, 64, 90) for heads in (16, 32, 128)),
    *((128, 512, 64, sm) for sm in (80, 100, 120)),
    (40, 256, 32, 90),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """kernel: its name. rows: of its tile. As in compiling.py else; wgmma: products of a group of warps. waits, of the machine
    code: for such products."""

    heads: int
    rank: int
    sm: int
    kernel: str
    rows: int
    registers: int
    spilled: int
    shared: int
    mma: int
    wgmma: int
    copies: int
    waits: int


def run(job: tuple[int, int, int, int]) -> list[Found]:
    heads, rank, rope, sm = job
    case = Case(name="compiled", batch=1, heads_q=heads, seqlen_kv=1024, bounds=((0, 1000),), splits=4)
    given: Any = {"rank": rank, "rope": rope, "dtype": torch.bfloat16, "device": "cpu"}
    schedule = latent_schedule.schedule(of_latent(case, **given).spec, Target.fake(sm=sm))
    problem = of_latent(case, **given, schedule=schedule)
    launched: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def record(
        _: Any, kernel: Any, key: Any, grid: Any, tensors: Any, numbers: Any, how: Any, __: Any, **options: Any
    ) -> None:
        values = dict(zip(kernel.arg_names, (*tensors, *numbers), strict=False))
        launched.append((kernel, {**values, "HOW": how()}, options))

    with mock.patch.object(replaying, "launch", record):
        results(problem)
    found = []
    for kernel, values, options in launched:
        kind = GluonASTSource if kernel.is_gluon() else ASTSource
        compiled = compiled_for(source_of(kernel, values, kind), options, sm)
        registers, spilled = resources(compiled.asm["cubin"])
        ptx, code = compiled.asm["ptx"], said_of(compiled.asm["cubin"], "-sass")
        found.append(
            Found(
                heads=heads,
                rank=rank,
                sm=sm,
                kernel=kernel.__name__,
                rows=schedule.rows or 0,
                registers=registers,
                spilled=spilled,
                shared=compiled.metadata.shared,
                mma=ptx.count("mma.sync"),
                wgmma=ptx.count("wgmma.mma_async"),
                copies=ptx.count("cp.async.cg") + ptx.count("cp.async.bulk.tensor"),
                waits=code.count("WARPGROUP.DEPBAR"),
            )
        )
    return found


if __name__ == "__main__":
    say(run, JOBS)
