"""Compiles the kernels of linear attention for GPUs that need not be here, and says what they take, as JSON:
python -m tests.lowerings.linear.kernels.compiling [NAME ...]"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from attn_compiler.lowerings.linear import triton_backward, triton_launch, triton_tensors
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import by_newer
from attn_compiler.lowerings.shared.launching.dry_run import recording
from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.limits.triton_releases import FUSION
from attn_compiler.spec.linear import LinearForm
from tests.lowerings.hopper.kernels.letting_go import letting_go
from tests.lowerings.triton.kernels.compiling import resources, source

MACHINES = (80, 90)


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """A layer of a model. channel, ssd: which recurrence. length: tokens; 1 is a step with a state."""

    groups: int
    heads: int
    dim_k: int
    dim_v: int
    recurrence: str = "delta"
    channel: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "qwen3_next": LinearCase(groups=16, heads=32, dim_k=128, dim_v=128),
    "kimi": LinearCase(groups=32, heads=32, dim_k=128, dim_v=128, channel=True),
    "bamba": LinearCase(groups=1, heads=128, dim_k=128, dim_v=64, recurrence="ssd"),
    "small_float": LinearCase(groups=2, heads=2, dim_k=64, dim_v=64, dtype=torch.float32),
    "wide": LinearCase(groups=4, heads=4, dim_k=256, dim_v=256),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """registers, spilled: of a thread; spilled in bytes. shared: bytes of a program. products: instructions of tensor cores; wgmma: those
    of Hopper among them, which are asynchronous. under_way: `LettingGo`, of loads of what the copy engine wrote."""

    case: str
    kernel: str
    sm: int
    registers: int
    spilled: int
    shared: int
    products: int
    wgmma: int
    under_way: int = 0


Launch = tuple[Any, dict[str, torch.Tensor], Arguments]


class _Launches:
    """Takes launches instead of the GPU."""

    def __init__(self) -> None:
        self.found: list[Launch] = []

    def allocated(self, tensor: Any) -> None:
        """Memory is nothing to these tensors."""

    def launched(self, kernel: Any, tensors: Mapping[str, Any], arguments: Any) -> None:
        self.found.append((kernel, dict(tensors), arguments))


def launches(case: LinearCase, sm: int) -> list[Launch]:
    """Of a training step and of one token."""
    taker, has_wgmma = _Launches(), sm == 90 and "DISABLE_MMA_V3" not in os.environ
    with recording(taker), mock.patch.object(triton_tensors, "_has_wgmma", return_value=has_wgmma):
        for length in (4096, 1):
            given, text = _given(case, length)
            out, last = triton_launch.forward(*given, text)
        given, text = _given(case, 4096)
        triton_backward.backward(torch.empty_like(given[2], dtype=out.dtype), last, *given, text)
    return taker.found


def _given(case: LinearCase, length: int) -> tuple[list[torch.Tensor], str]:
    def of(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, is_ssd = (2, length), case.recurrence == "ssd"
    state = (case.dim_v, case.dim_k) if is_ssd else (case.dim_k, case.dim_v)
    form = LinearForm(
        function="models:any#0",
        recurrence=case.recurrence,  # type: ignore[arg-type]
        roles=(),
        channel=case.channel,
        eps=None if is_ssd else 1e-6,
        out_dtype="float32" if is_ssd else str(case.dtype).removeprefix("torch."),
    )
    given = [
        of(*tokens, case.groups, case.dim_k),
        of(*tokens, case.groups, case.dim_k),
        of(*tokens, case.heads, case.dim_v),
        of(*tokens, case.heads, *((case.dim_k,) if case.channel else ()), dtype=torch.float32),
        of(*tokens, case.heads),
        of(case.heads, dtype=torch.float32) if is_ssd else None,
        of(2, case.heads, *state, dtype=torch.float32),
    ]
    return given, form.text  # type: ignore[return-value]


def compiled(name: str, launch: Launch, sm: int) -> Found:
    """One kernel for one machine."""
    kernel, tensors, arguments = launch
    given = {parameter: None if key is None else tensors[key] for parameter, key in arguments.tensors.items()}
    is_gluon = isinstance(kernel, GluonJITFunction)
    source_of = source(kernel, {**given, **arguments.numbers}, GluonASTSource if is_gluon else ASTSource)
    options = {} if arguments.tile is None else arguments.tile.launch_options
    # On Hopper the kernels are refused without the newer assembler.
    make = by_newer if sm == 90 else compile_kernel
    made = make(source_of, target=GPUTarget("cuda", sm, 32), options={**options, **FUSION})
    registers, spilled = resources(made.asm["cubin"])
    ptx, kernel_name = made.asm["ptx"], kernel.fn.__name__
    let_go = letting_go(made.asm["cubin"], kernel_name).under_way or (-1,) if is_gluon else ()
    return Found(
        case=name,
        kernel=kernel_name,
        sm=sm,
        registers=registers,
        spilled=spilled,
        shared=made.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        products=sum(ptx.count(one) for one in ("mma.sync", "wgmma.mma_async", "tcgen05.mma")),
        under_way=sum(let_go),
    )


def jobs() -> list[str]:
    """Names of all that is compiled."""
    return [f"{case}-{sm}" for case in CASES for sm in MACHINES]


def main() -> None:
    """Of the jobs that are named, or of all."""
    asked = [job.rsplit("-", 1) for job in sys.argv[1:] or jobs()]
    found = [asdict(compiled(case, one, int(sm))) for case, sm in asked for one in launches(CASES[case], int(sm))]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
