"""Linear attention on a GPU: calls of models' own functions, with the heads of Qwen3-Next, OLMo-hybrid, Kimi-Linear and Bamba.

    python -m benchmarks.bench_linear_gpu [--sizes smoke] [--dtype float16] [--budget 150]

Sides: `inductor`, which compiles the model's own function; our lowerings, `linear_triton` in both precisions; and flash-linear-attention,
where it can be imported. Our kernels are measured first, on all cases; the others as long as the budget lasts. Inductor unrolls the loop
over chunks of the delta rule, which takes minutes at 32k tokens: there it is measured up to `--unrolled` tokens. A row is written as soon
as it is measured. `error` is the largest difference from the recurrence in float64, of the largest number, up to 4096 tokens. `assembler`
is that of `linear_triton`. `graph_ms` is of a step of decoding in a CUDA graph, as engines decode.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

import attn_compiler
from attn_compiler.lowerings.linear.reference import run as by_chunks
from attn_compiler.spec.linear import LinearForm
from attn_compiler.spec.target import Target
from benchmarks import harness, kernel_timing, linear_layers
from benchmarks.harness import Bench, Row, arg
from benchmarks.linear_layers import LAYERS, Heads, LinearLayer

KEYS = ("layer", "scenario", "batch", "length", "dtype", "side", "assembler")
COLUMNS = ("p50_ms", "p20_ms", "graph_ms", "first_step_s", "peak_gib", "error", "error_grads", "taken", "failure")
#: our sides: a lowering, and the precision that is asked for
OURS = {
    "linear_triton": ("linear_triton", "exact"),
    "linear_triton fla": ("linear_triton", "fla"),
    "linear_reference": ("linear_reference", "exact"),
}
SIDES = (*OURS, "inductor", "fla", "eager")
_COMPARED = 4096
_WARM, _ROUNDS, _SECONDS = 3, 40, 1.0
#: steps in a CUDA graph
_RECORDED = 10


@dataclass(frozen=True, kw_only=True)
class GpuCase(harness.Named):
    """One side. scenario: "training", "prefill" or "decode"."""

    layer: str
    scenario: str
    batch: int
    length: int
    dtype: str = "bfloat16"
    side: str

    @property
    def heads(self) -> Heads:
        return LAYERS[self.layer]

    @property
    def is_ssd(self) -> bool:
        return self.heads.function == "state_space"

    def built(self) -> LinearLayer:
        how = {"is_one": self.scenario == "decode", "gives_state": self.scenario != "training"}
        return LinearLayer(self.heads, self.batch, self.length, getattr(torch, self.dtype), "cuda", **how)


_SMOKE = (("training", 4, 2048), ("prefill", 1, 2048), ("decode", 64, 1))
_FURTHER = (
    ("training", 1, 8192), ("prefill", 1, 32768), ("decode", 1, 1), ("training", 1, 32768), ("prefill", 1, 8192),
)  # fmt: skip
_SHORT = (("training", 4, 512), ("prefill", 1, 512), ("training", 4, 100), ("prefill", 1, 100), ("prefill", 1, 20))
SIZES = {"smoke": _SMOKE, "usual": _SMOKE + _FURTHER, "short": _SHORT}


def step_of(case: GpuCase, layer: LinearLayer) -> Callable[[], list[Tensor]]:
    """One call: a result, in training with all gradients."""
    settings: dict[str, Any] = {"backend": "inductor", "dynamic": False}
    if case.side in OURS:
        lowering, precision = OURS[case.side]
        options = {"lowering": lowering, "linear_precision": precision, "strict": True}
        settings |= {"backend": "attn_compiler", "options": options}
    run: Callable[..., Tensor] = layer
    if case.side == "fla":
        run = linear_layers.by_fla(layer)
    elif case.side != "eager":
        run = torch.compile(layer, **settings)  # type: ignore[call-overload]
    wanted = [x for name, x in layer.given.items() if not (case.side == "fla" and name in ("D", "dt_bias"))]
    noise: list[Tensor] = []

    def step() -> list[Tensor]:
        if case.scenario != "training":
            with torch.no_grad():
                return [run()]
        out = run()
        noise[:] = noise or [_noise(out, out.dtype)]
        return [out.detach(), *torch.autograd.grad(out, wanted, noise[0])]

    return step


def _noise(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.randn(like.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)


def errors(case: GpuCase, layer: LinearLayer, found: Sequence[Tensor]) -> dict[str, str]:
    """The largest differences from the recurrence in float64, of what a step gave."""
    if case.length > _COMPARED or case.scenario == "decode":
        return {}
    form, roles = _exact(case)
    given = [layer.given[name].detach().double().requires_grad_() for name in roles]
    out, _ = by_chunks(given, form.text)
    far = [_far(found[0], out.detach())]
    if len(found) == len(given) + 1:
        noise = _noise(out, found[0].dtype)
        grads = dict(zip(roles, torch.autograd.grad(out, given, noise.double()), strict=True))
        far += [_far(one, grads[name]) for name, one in zip(layer.given, found[1:], strict=True)]
    each = " ".join(f"{name} {value:.2g}" for name, value in zip(layer.given, far[1:], strict=False))
    return {"error": f"{far[0]:.3g}", "error_grads": each}


def _far(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def _exact(case: GpuCase) -> tuple[LinearForm, tuple[str, ...]]:
    wide = {"out_dtype": "float64", "state_dtype": "float64", "function": case.heads.many}
    if case.is_ssd:
        roles = ("x", "dt", "A", "B", "C", "D", "dt_bias")
        form = LinearForm(recurrence="ssd", roles=roles, softplus=True, limits=(0.0, float("inf")), **wide)  # type: ignore[arg-type]
        return form, ("v", "beta", "A", "k", "q", "D", "dt_bias")
    names = ("q", "k", "v", "g", "beta")
    channel = case.heads.function == "channel_delta"
    return LinearForm(recurrence="delta", roles=names, channel=channel, eps=1e-6, **wide), names  # type: ignore[arg-type]


def measure(case: GpuCase, given: Namespace) -> Iterator[Row]:
    """One side of a case."""
    torch._dynamo.reset()
    attn_compiler.reset()
    torch.cuda.reset_peak_memory_stats()
    layer = case.built()
    step = step_of(case, layer)
    start = time.perf_counter()
    found = step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30
    taken = [one.decision.lowering for report in attn_compiler.reports() for one in report.linear]
    times = sorted(timed(step))
    yield {
        **case.names, "assembler": assembler() if case.side.startswith("linear_triton") else "",
        "p50_ms": f"{statistics.median(times):.4g}", **(_recorded(step) if case.scenario == "decode" else {}),
        "p20_ms": f"{times[len(times) // 5]:.4g}", "first_step_s": f"{first:.3g}", "peak_gib": f"{peak:.3g}",
        "taken": ", ".join(taken), **errors(case, layer, found),
    }  # fmt: skip


def timed(step: Callable[[], Any]) -> list[float]:
    """Milliseconds of calls, of CUDA events. The host stays ahead, so launches cost nothing where the GPU is the slower."""
    for _ in range(_WARM):
        step()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS + 1)]
    start, done = time.perf_counter(), 0
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
        done += 1
        if done % 5 == 0:
            torch.cuda.synchronize()
            if time.perf_counter() - start > _SECONDS:
                break
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in itertools.pairwise(marks[: done + 1])]


def _recorded(step: Callable[[], Any]) -> dict[str, str]:
    """Of a step in a CUDA graph, in which the host's time does not count. The rest of the row stands where none can be recorded."""
    try:
        graph = kernel_timing.graph_of([step] * _RECORDED)
    except RuntimeError as error:
        return {"failure": f"CUDA graph: {str(error)[:200]}"}
    return {"graph_ms": f"{statistics.median(timed(graph.replay)) / _RECORDED:.4g}"}


def cases(given: Namespace) -> list[GpuCase]:
    """Our kernels on all cases, then fla, the others case by case, the most telling first."""

    def applies(case: GpuCase) -> bool:
        unrolled = not (case.is_ssd or case.scenario == "decode" or case.length <= given.unrolled)
        return not (case.side == "inductor" and unrolled) and (case.side != "fla" or linear_layers.HAS_FLA)

    wanted = given.sides.split(",") if given.sides else [side for side in SIDES if side != "eager"]
    every = [
        GpuCase(layer=layer, scenario=scenario, batch=batch, length=length, dtype=given.dtype, side=side)
        for scenario, batch, length in SIZES[given.sizes]
        if scenario in given.scenarios.split(",")
        for layer in given.layers.split(",")
        for side in SIDES
        if side in wanted
    ]
    places = {"linear_triton": 0, "linear_triton fla": 1, "fla": 1}
    return sorted(filter(applies, every), key=lambda case: places.get(case.side, 2))


def assembler() -> str:
    """Of our kernels: "ptxas 13.1", or "ptxas 12.8, no wgmma"."""
    target = Target.current("cuda")
    return f"ptxas {target.ptxas}" + ", no wgmma" * target.without_wgmma


def rows(cases: Sequence[GpuCase], given: Namespace) -> harness.Measured:
    """With caches that are empty at first. A case that hangs, or compiles for minutes, ends the process. Rows are on disk."""
    faulthandler.dump_traceback_later(given.budget_seconds + given.grace, exit=True)
    with fresh_cache():
        yield from harness.one_by_one(BENCH, cases, given)
    faulthandler.cancel_dump_traceback_later()


BENCH = Bench(
    doc=__doc__, results="linear_gpu.csv", columns=(*KEYS, *COLUMNS), cases=cases, measure=measure, rows=rows, sides=SIDES,
    devices=("cuda",), budget=150.0, forget=lambda device: torch.cuda.empty_cache(),
    options=(
        arg("--sizes", choices=list(SIZES), default="usual"),
        arg("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16"),
        arg("--grace", type=float, default=30.0, help="seconds after the budget, when what runs is ended (%(default)s)"),
        arg("--layers", default=",".join(LAYERS)),
        arg("--scenarios", default="training,prefill,decode"),
        arg("--sides", default="", help="of " + ", ".join(SIDES)),
        arg("--unrolled", type=int, default=2048, help="tokens that Inductor unrolls at most (%(default)s)"),
    ),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
