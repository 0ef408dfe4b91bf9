"""On a GPU, a Llama-like model's training step and prefill with attention in FP8, beside our own bfloat16.

    python -m benchmarks.bench_fp8_models --budget-seconds 120

Eight layers with heads of 128 or 64 in bfloat16, 8192 and 16384 tokens, random weights. Each side is compiled by our backend in a process
of its own, as many at a time as --jobs; those of a wave are timed in turn, a few steps each, forwards and backwards, while the others wait.
As the GPU warms up its clock falls, and every step takes 1 to 2% longer: so `ratio` is the median over the turns of bfloat16's median
in a turn over the side's, if bfloat16 is in the same wave. Milliseconds of the GPU; `memory_gb` the most that one step allocates,
`difference` the root mean square of the difference from the model's output without any compilation, relative to its own. Writes
benchmarks/results/fp8_models_h200.csv, and with --kernels the GPU's time of one step by kernel.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import attn_compiler
from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling
from benchmarks import bench_kernels, harness, waves
from benchmarks.harness import BACKEND

RESULTS = Path(__file__).parent / "results" / "fp8_models_h200.csv"
BASELINE = "bfloat16"
KEYS = ("scenario", "layers", "hidden", "heads", "heads_kv", "head_dim", "batch", "seqlen", "side")
MEASURED = ("lowerings", "rounds", "p20_ms", "p50_ms", "p80_ms", "ratio", "memory_gb", "difference", "failure")
COLUMNS = (*KEYS, *MEASURED)
#: of a row before it is written: milliseconds, turn by turn; kernels, calls and microseconds of one step
_TIMES, _KERNELS = "times", "kernels"
KERNEL_COLUMNS = (*KEYS, "kernel", "calls", "us")
#: of a step, the longest
_MOST_KERNELS = 25

SIDES: Mapping[str, Fp8Recipe | None] = {
    BASELINE: None,
    "fp8, per block": Fp8Recipe(force=True),
    "fp8, per tensor": Fp8Recipe(scaling=CurrentScaling(granularity="tensor"), force=True),
    "fp8, delayed": Fp8Recipe(scaling=DelayedScaling(), force=True),
    "fp8, static": Fp8Recipe(scaling=StaticScaling(q=8, k=8, v=8), force=True),
    "fp8, backward too": Fp8Recipe(scaling=CurrentScaling(granularity="tensor"), backward=True, force=True),
    "fp8, delayed, backward too": Fp8Recipe(scaling=DelayedScaling(), backward=True, force=True),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """training: a step without the optimizer; else a prefill. group: heads of q for one of k and v."""

    training: bool
    hidden: int
    heads: int
    batch: int
    seqlen: int
    layers: int = 8
    group: int = 1

    @property
    def heads_kv(self) -> int:
        return self.heads // self.group

    @property
    def columns(self) -> dict[str, str]:
        sizes = {
            name: str(getattr(self, name)) for name in ("layers", "hidden", "heads", "heads_kv", "batch", "seqlen")
        }
        return {
            "scenario": "training" if self.training else "prefill",
            "head_dim": str(self.hidden // self.heads),
        } | sizes


SCENARIOS = (
    Scenario(training=True, hidden=2048, heads=16, batch=2, seqlen=8192),
    Scenario(training=True, hidden=1024, heads=8, batch=2, seqlen=8192),
    Scenario(training=False, hidden=2048, heads=16, batch=2, seqlen=8192),
    Scenario(training=True, hidden=1024, heads=8, batch=1, seqlen=16384),
    Scenario(training=False, hidden=1024, heads=8, batch=1, seqlen=16384),
    Scenario(training=True, hidden=2048, heads=32, batch=2, seqlen=8192),
    Scenario(training=True, hidden=2048, heads=16, batch=2, seqlen=8192, group=4),
    Scenario(training=True, hidden=1024, heads=8, batch=2, seqlen=8192, group=4),
    Scenario(training=False, hidden=2048, heads=16, batch=2, seqlen=8192, group=4),
)


def model_of(scenario: Scenario, device: str) -> nn.Module:
    """Without a head: its logits would take most of the memory."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=scenario.hidden,
        intermediate_size=scenario.hidden * 8 // 3 // 128 * 128,
        num_hidden_layers=scenario.layers,
        num_attention_heads=scenario.heads,
        num_key_value_heads=scenario.heads_kv,
        vocab_size=1024,
        max_position_embeddings=scenario.seqlen,
        use_cache=False,
    )
    model: nn.Module = LlamaModel(config).to(device, torch.bfloat16)
    return model.train(scenario.training)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One side of a scenario, and how long it is timed in each turn."""

    scenario: Scenario
    side: str
    device: str
    seconds: float
    kernels: bool = False


def prepare(job: Job, lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile a side and hold its output against the model's own; its row follows by timing it. lock: while steps run."""
    scenario = job.scenario
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1024, (scenario.batch, scenario.seqlen), generator=generator).to(job.device)
    model = model_of(scenario, job.device)
    recipe = SIDES[job.side]
    options: dict[str, Any] = {} if recipe is None else {"fp8_recipe": recipe}
    compiled: Any = torch.compile(model, backend=BACKEND, options=options, dynamic=False)
    step = harness.make_step(compiled, {"input_ids": tokens}, training=scenario.training)
    row = {}
    try:
        # The first step of delayed scaling knows no magnitudes.
        step()
        out = step().float()
        # Others compile, and have the rest of the memory.
        torch.cuda.empty_cache()
        row["lowerings"] = _lowerings()
        with lock:
            with torch.no_grad():
                exact = harness.main_output(model(input_ids=tokens)).float()
            row["difference"] = f"{float((out - exact).norm() / exact.norm()):.3g}"
            del out, exact
            torch.cuda.empty_cache()
            row["memory_gb"] = _most_memory(step, job.device)
            torch.cuda.empty_cache()
    except Exception as failure:  # noqa: BLE001 (the row says so)
        return functools.partial(dict, row, failure=bench_kernels.reason(failure, []))
    return _Turns(job=job, row=row, step=step)


def _most_memory(step: harness.Step, device: str) -> str:
    step()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f}"


@dataclass(kw_only=True)
class _Turns:
    """Gives a row with the times of one turn; the first one also has kernels, where they are asked for."""

    job: Job
    row: dict[str, str]
    step: harness.Step
    is_profiled: bool = False

    def __call__(self) -> waves.Row:
        job = self.job
        values = harness.interleave({job.side: self.step}, job.device, seconds=job.seconds, min_rounds=3, warmup=1)
        found = self.row | {_TIMES: json.dumps(values[job.side])}
        if job.kernels and not self.is_profiled:
            self.is_profiled, found[_KERNELS] = True, json.dumps(_kernels(self.step))
        torch.cuda.empty_cache()
        return found


def _kernels(step: harness.Step) -> list[tuple[str, int, float]]:
    """Of one step, with its calls and the microseconds of all of them; first all together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    averages = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    found = sorted(((e.key, e.count, e.self_device_time_total) for e in averages), key=lambda each: -each[2])
    return [("all", sum(calls for _, calls, _ in found), sum(us for *_, us in found)), *found[:_MOST_KERNELS]]


def merge(rows: Sequence[waves.Row]) -> waves.Row:
    """One row of those of all turns: what they share, and percentiles of all times."""
    if any(_TIMES not in row for row in rows):
        return dict(rows[-1])
    times = [json.loads(row[_TIMES]) for row in rows]
    flat = [value for turn in times for value in turn]
    p20, p50, p80 = harness.percentiles(flat)
    medians = {"rounds": str(len(flat)), "p20_ms": f"{p20:.3f}", "p50_ms": f"{p50:.3f}", "p80_ms": f"{p80:.3f}"}
    kernels = {_KERNELS: rows[0][_KERNELS]} if _KERNELS in rows[0] else {}
    return rows[-1] | medians | kernels | {_TIMES: json.dumps(times)}


def rows_of(found: Sequence[tuple[Job, waves.Row | None]]) -> list[dict[str, str]]:
    """All rows, with how many times as fast as bfloat16 each one is, turn by turn."""
    times = {(job.scenario, job.side): json.loads((row or {}).get(_TIMES, "[]")) for job, row in found}
    rows = []
    for job, measured in found:
        row = job.scenario.columns | {"side": job.side} | (measured or {"failure": "not run"})
        for name in (_TIMES, _KERNELS):
            row.pop(name, None)
        usual, own = times.get((job.scenario, BASELINE), []), times[job.scenario, job.side]
        if own and len(usual) == len(own):
            row["ratio"] = f"{statistics.median(map(_ratio, usual, own)):.3f}"
        rows.append(row)
    return rows


def kernel_rows_of(found: Sequence[tuple[Job, waves.Row | None]]) -> list[dict[str, str]]:
    """Of every side that was profiled: its longest kernels, behind all of them together ("all")."""
    rows = []
    for job, measured in found:
        for kernel, calls, us in json.loads((measured or {}).get(_KERNELS, "[]")):
            own = {"side": job.side, "kernel": kernel, "calls": str(calls), "us": f"{us:.1f}"}
            rows.append(job.scenario.columns | own)
    return rows


def _ratio(usual: Sequence[float], own: Sequence[float]) -> float:
    return statistics.median(usual) / statistics.median(own)


def _lowerings() -> str:
    """Of the newest report."""
    report = attn_compiler.reports()[-1]
    names = {site.decision.lowering for site in report.sites if site.decision is not None}
    return ", ".join(sorted(names))


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Every row."""
    table = Table(title="milliseconds, medians; ratio above 1: faster than bfloat16")
    names = (
        *KEYS[:1],
        "hidden",
        "head_dim",
        "seqlen",
        "side",
        "lowerings",
        "p50_ms",
        "ratio",
        "memory_gb",
        "difference",
    )
    for name in (*names, "failure"):
        table.add_column(name)
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names), row.get("failure", "")[:60])
    Console(width=None if sys.stdout.isatty() else 190).print(table)


def main() -> int:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--append", action="store_true")
    parser.add_argument(
        "--scenarios", nargs="+", type=int, default=list(range(len(SCENARIOS))), help="places in SCENARIOS"
    )
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument("--seconds", type=float, default=0.3, help="for each side in each turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--kernels", type=Path, help="write the time of kernels here, too")
    waves.add_arguments(parser, budget_seconds=600.0)
    parser.add_argument("--commit")
    given = parser.parse_args()
    device = "cuda"
    environment = harness.environment(device, given.commit)
    file = harness.CsvFile(given.output, [*COLUMNS, *environment], append=given.append)
    jobs = [
        Job(
            scenario=SCENARIOS[place],
            side=side,
            device=device,
            seconds=given.seconds,
            kernels=given.kernels is not None,
        )
        for place in given.scenarios
        for side in given.sides
    ]
    until = time.monotonic() + given.budget_seconds
    found = waves.run(jobs, prepare, until=until, turns=given.turns, merge=merge, **waves.asked(given))
    with Progress(console=Console(stderr=True)) as progress:
        done = list(progress.track(found, total=len(jobs), description="sides"))
    for row in rows_of(done):
        file.add(row | environment)
    if given.kernels is not None:
        kernels = harness.CsvFile(given.kernels, [*KERNEL_COLUMNS, *environment], append=given.append)
        for row in kernel_rows_of(done):
            kernels.add(row | environment)
    print_table(file.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
