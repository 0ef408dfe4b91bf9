"""Linear attention on a GPU: calls of models' own functions, with the heads of Qwen3-Next, OLMo-hybrid, Kimi-Linear and Bamba.

    python -m benchmarks.bench_linear_gpu [--sizes smoke] [--dtype float16] [--budget 150]

Sides: `inductor`, which compiles the model's own function; our lowerings; and flash-linear-attention, where it can be imported. Our kernels
are measured first, on all cases; the others as long as the budget lasts. Inductor unrolls the loop over chunks of the delta rule, which
takes minutes at 32k tokens: there it is measured up to `--unrolled` tokens. A row is written as soon as it is measured. `error` is the
largest difference from the recurrence in float64, of the largest number, up to 4096 tokens. `assembler` is that of `linear_triton`.
`graph_ms` is of a step of decoding in a CUDA graph, as engines decode. Writes benchmarks/results/linear_gpu.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import importlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import attn_compiler
from attn_compiler.lowerings.linear.reference import run as by_chunks
from attn_compiler.spec.linear import LinearForm
from attn_compiler.spec.target import Target
from benchmarks import harness, linear_groups
from benchmarks.linear_peers import PEERS

RESULTS = Path(__file__).parent / "results" / "linear_gpu.csv"
KEYS = ("layer", "scenario", "batch", "length", "dtype", "side", "assembler")
COLUMNS = ("p50_ms", "p20_ms", "graph_ms", "first_step_s", "peak_gib", "error", "error_grads", "taken", "failure")
OURS = ("linear_triton", "linear_reference")
_COMPARED = 4096
_WARM, _ROUNDS, _SECONDS = 3, 40, 1.0
#: steps in a CUDA graph
_RECORDED = 10


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Of a layer of a model. function: of benchmarks/linear_peers.py. module: of transformers; many, one: its functions."""

    function: str
    module: str
    many: str
    one: str
    groups: int
    heads: int
    dim_k: int
    dim_v: int


LAYERS = {
    "qwen3_next": Heads(
        function="gated_delta",
        module="qwen3_next",
        many="torch_chunk_gated_delta_rule",
        one="torch_recurrent_gated_delta_rule",
        groups=16,
        heads=32,
        dim_k=128,
        dim_v=128,
    ),
    "olmo_hybrid": Heads(
        function="gated_delta",
        module="olmo_hybrid",
        many="torch_chunk_gated_delta_rule",
        one="torch_recurrent_gated_delta_rule",
        groups=30,
        heads=30,
        dim_k=96,
        dim_v=192,
    ),
    "bamba": Heads(
        function="state_space",
        module="bamba",
        many="mamba2_chunk_scan",
        one="mamba2_selective_state_update",
        groups=1,
        heads=128,
        dim_k=128,
        dim_v=64,
    ),
    "kimi_linear": Heads(
        function="channel_delta",
        module="kimi_linear",
        many="chunk_kimi_delta_attention",
        one="recurrent_kimi_delta_attention",
        groups=32,
        heads=32,
        dim_k=128,
        dim_v=128,
    ),
}


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """scenario: "training", "prefill" or "decode"."""

    layer: str
    scenario: str
    batch: int
    length: int
    dtype: str = "bfloat16"

    @property
    def heads(self) -> Heads:
        return LAYERS[self.layer]

    @property
    def is_ssd(self) -> bool:
        return self.heads.function == "state_space"


class LinearLayer(nn.Module):
    """A call of a function, whose operands are parameters. Given as a model gives them: q, k and v in its dtype, decays in float32."""

    def __init__(self, case: GpuCase) -> None:
        super().__init__()
        self.case, heads = case, case.heads
        module = importlib.import_module(f"transformers.models.{heads.module}.modeling_{heads.module}")
        self.run: Callable[..., Any] = getattr(module, heads.one if case.scenario == "decode" else heads.many)
        self.has_groups = linear_groups.has_groups(self.run)
        self.given = nn.ParameterDict({name: nn.Parameter(x) for name, x in _operands(case).items()})
        state = (heads.dim_v, heads.dim_k) if case.is_ssd else (heads.dim_k, heads.dim_v)
        self.register_buffer("state", torch.zeros(case.batch, heads.heads, *state, device="cuda"))

    def forward(self) -> Tensor:
        x, is_one = self.given, self.case.scenario == "decode"
        if self.case.is_ssd:
            return self._state_space(is_one)
        state = {
            "initial_state": self.state if is_one else None,
            "output_final_state": self.case.scenario != "training",
        }
        named = {"g": x["g"], "beta": x["beta"]}
        heads = {name: x[name] for name in ("q", "k", "v")}
        if not self.has_groups:
            heads |= linear_groups.for_each_head(heads)
        out, last = self.run(heads["q"], heads["k"], heads["v"], **named, use_qk_l2norm_in_kernel=True, **state)
        if last is not None:
            self.state.copy_(last)
        return out  # type: ignore[no-any-return]

    def _state_space(self, is_one: bool) -> Tensor:
        x, heads = self.given, self.case.heads
        if not is_one:
            more = {"D": x["D"], "dt_bias": x["dt_bias"], "dt_softplus": True}
            return self.run(x["v"], x["beta"], x["A"], x["k"], x["q"], chunk_size=256, **more)  # type: ignore[no-any-return]
        dim, size = heads.dim_v, heads.dim_k
        spread = x["beta"][:, 0, :, None].expand(-1, -1, dim), x["A"][:, None, None].expand(-1, dim, size)
        wide = {name: x[name][:, None].expand(-1, dim) for name in ("D", "dt_bias")}
        return self.run(self.state, x["v"][:, 0], *spread, x["k"][:, 0], x["q"][:, 0], **wide, dt_softplus=True)  # type: ignore[no-any-return]


def _operands(case: GpuCase) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens, heads, half = (case.batch, case.length), case.heads, getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    made = {name: normal(*tokens, heads.groups, heads.dim_k).to(half) for name in ("q", "k")}
    made["v"] = normal(*tokens, heads.heads, heads.dim_v).to(half)
    if case.is_ssd:
        numbers = {
            "A": -normal(heads.heads).exp(),
            "D": normal(heads.heads).to(half),
            "dt_bias": normal(heads.heads).to(half),
        }
        return made | {"beta": normal(*tokens, heads.heads).to(half)} | numbers
    decay = normal(*tokens, heads.heads, *((heads.dim_k,) if heads.function == "channel_delta" else ()))
    return made | {"g": -F.softplus(decay - 2), "beta": normal(*tokens, heads.heads).sigmoid().to(half)}


_SMOKE = (("training", 4, 2048), ("prefill", 1, 2048), ("decode", 64, 1))
_FURTHER = (
    ("training", 1, 8192),
    ("prefill", 1, 32768),
    ("decode", 1, 1),
    ("training", 1, 32768),
    ("prefill", 1, 8192),
)
_SHORT = (("training", 4, 512), ("prefill", 1, 512), ("training", 4, 100), ("prefill", 1, 100), ("prefill", 1, 20))
SIZES = {"smoke": _SMOKE, "usual": _SMOKE + _FURTHER, "short": _SHORT}


def cases(layers: Sequence[str], scenarios: Sequence[str], sizes: str, dtype: str) -> Iterator[GpuCase]:
    """What is measured, the most telling first. sizes: of SIZES."""
    for scenario, batch, length in SIZES[sizes]:
        if scenario not in scenarios:
            continue
        for layer in layers:
            yield GpuCase(layer=layer, scenario=scenario, batch=batch, length=length, dtype=dtype)


def step_of(case: GpuCase, layer: LinearLayer, side: str) -> Callable[[], list[Tensor]]:
    """One call: a result, in training with all gradients."""
    settings: dict[str, Any] = {"backend": "inductor", "dynamic": False}
    if side in OURS:
        settings |= {"backend": "attn_compiler", "options": {"lowering": side, "strict": True}}
    run: Callable[..., Tensor] = layer
    if side == "fla":
        run = PEERS[case.heads.function](case.scenario, layer.given, layer.state)
    elif side != "eager":
        run = torch.compile(layer, **settings)  # type: ignore[call-overload]
    wanted = [x for name, x in layer.given.items() if not (side == "fla" and name in ("D", "dt_bias"))]
    noise: list[Tensor] = []

    def step() -> list[Tensor]:
        if case.scenario != "training":
            with torch.no_grad():
                return [run()]
        out = run()
        if not noise:
            noise.append(
                torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(out.dtype)
            )
        return [out.detach(), *torch.autograd.grad(out, wanted, noise[0])]

    return step


def errors(case: GpuCase, layer: LinearLayer, found: Sequence[Tensor]) -> dict[str, str]:
    """The largest differences from the recurrence in float64, of what a step gave."""
    if case.length > _COMPARED or case.scenario == "decode":
        return {}
    form, roles = _exact(case)
    given = [layer.given[name].detach().double().requires_grad_() for name in roles]
    out, _ = by_chunks(given, form.text)
    far = [_far(found[0], out.detach())]
    if len(found) == len(given) + 1:
        noise = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(
            found[0].dtype
        )
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


def measure(case: GpuCase, side: str) -> dict[str, str]:
    """One side of a case."""
    torch._dynamo.reset()
    attn_compiler.reset()
    torch.cuda.reset_peak_memory_stats()
    layer = LinearLayer(case)
    step = step_of(case, layer, side)
    start = time.perf_counter()
    found = step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30
    taken = [one.decision.lowering for report in attn_compiler.reports() for one in report.linear]
    times = sorted(timed(step))
    return {
        "p50_ms": f"{statistics.median(times):.4g}",
        **(_recorded(step) if case.scenario == "decode" else {}),
        "p20_ms": f"{times[len(times) // 5]:.4g}",
        "first_step_s": f"{first:.3g}",
        "peak_gib": f"{peak:.3g}",
        "taken": ", ".join(taken),
        **errors(case, layer, found),
    }


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
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(_RECORDED):
                step()
    except RuntimeError as error:
        return {"failure": f"CUDA graph: {str(error)[:200]}"}
    return {"graph_ms": f"{statistics.median(timed(graph.replay)) / _RECORDED:.4g}"}


def sides(case: GpuCase, unrolled: int) -> Iterator[str]:
    """What may be measured of a case."""
    yield from OURS
    if case.is_ssd or case.scenario == "decode" or case.length <= unrolled:
        yield "inductor"
    yield "eager"
    if PEERS:
        yield "fla"


def jobs(options: argparse.Namespace) -> list[tuple[GpuCase, str]]:
    """Our kernels on all cases, then fla, the others case by case."""
    found = list(cases(options.layers.split(","), options.scenarios.split(","), options.sizes, options.dtype))
    every = [(case, side) for case in found for side in sides(case, options.unrolled)]
    wanted = options.sides.split(",") if options.sides else ["linear_triton", "fla", "linear_reference", "inductor"]
    first = [job for job in every if job[1] in ("linear_triton", "fla")]
    rest = [job for job in every if job not in first]
    return [job for job in (*sorted(first, key=lambda job: job[1] == "fla"), *rest) if job[1] in wanted]


def assembler() -> str:
    """Of our kernels: "ptxas 13.1", or "ptxas 12.8, no wgmma"."""
    target = Target.current("cuda")
    return f"ptxas {target.ptxas}" + ", no wgmma" * target.without_wgmma


def main() -> int:
    """Measure as much as the budget allows; 0 where nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=list(SIZES), default="usual")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--budget", type=float, default=150.0, help="seconds after which nothing new begins (default %(default)s)"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds after the budget, when what runs is ended (default %(default)s)",
    )
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--scenarios", default="training,prefill,decode")
    parser.add_argument("--sides", default="", help="of linear_triton, linear_reference, inductor, fla, eager")
    parser.add_argument(
        "--unrolled", type=int, default=2048, help="tokens that Inductor unrolls at most (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    began = time.perf_counter()
    # A case that hangs, or compiles for minutes, ends the process. Rows are on disk.
    faulthandler.dump_traceback_later(options.budget + options.grace, exit=True)
    where = harness.environment("cuda")
    file = harness.CsvFile(options.output, [*KEYS, *COLUMNS, *where])
    with fresh_cache():
        for case, side in jobs(options):
            if time.perf_counter() - began > options.budget:
                break
            names = {**{name: str(value) for name, value in dataclasses.asdict(case).items()}, "side": side}
            names["assembler"] = assembler() if side == "linear_triton" else ""
            try:
                row = measure(case, side)
            except Exception as error:  # noqa: BLE001 (a case that fails is a row)
                row = {"failure": f"{type(error).__name__}: {str(error)[:300]}"}
            file.add({**names, **row, **where})
            sys.stdout.write(" ".join([*names.values(), *(f"{k}={v}" for k, v in row.items())]) + "\n")
            sys.stdout.flush()
            torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    return int(any(row.get("failure") for row in file.rows))


if __name__ == "__main__":
    sys.exit(main())
