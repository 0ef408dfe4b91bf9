"""On a GPU, a Llama-like model's training step and prefill with attention in FP8, beside our own bfloat16.

    python -m benchmarks.bench_fp8_models --budget-seconds 120

Eight layers with heads of 128 or 64 in bfloat16, 8192 and 16384 tokens, random weights. Each side is compiled by our backend in a process
of its own, as many at a time as --jobs, and timed while the others wait; bfloat16 first and last. Milliseconds of the GPU; `ratio` is the
mean of bfloat16's two medians over the row's, `memory_gb` the most that one step allocates, `difference` the root mean square of the
difference from the model's output without any compilation, relative to its own. Writes benchmarks/results/fp8_models_h200.csv.
"""

from __future__ import annotations

import argparse
import functools
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
from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe
from benchmarks import bench_kernels, harness, waves
from benchmarks.harness import BACKEND

RESULTS = Path(__file__).parent / "results" / "fp8_models_h200.csv"
BASELINE = "bfloat16"
KEYS = ("scenario", "layers", "hidden", "heads", "head_dim", "batch", "seqlen", "side")
MEASURED = ("lowerings", "rounds", "p20_ms", "p50_ms", "p80_ms", "ratio", "memory_gb", "difference", "failure")
COLUMNS = (*KEYS, *MEASURED)

SIDES: Mapping[str, Fp8Recipe | None] = {
    BASELINE: None,
    "fp8, per block": Fp8Recipe(force=True),
    "fp8, per tensor": Fp8Recipe(scaling=CurrentScaling(granularity="tensor"), force=True),
    "fp8, delayed": Fp8Recipe(scaling=DelayedScaling(), force=True),
    "fp8, backward too": Fp8Recipe(scaling=CurrentScaling(granularity="tensor"), backward=True, force=True),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """training: a step without the optimizer; else a prefill. lowerings: of FP8, in this order; None: our own choice."""

    training: bool
    hidden: int
    heads: int
    batch: int
    seqlen: int
    layers: int = 8

    @property
    def columns(self) -> dict[str, str]:
        sizes = {name: str(getattr(self, name)) for name in ("layers", "hidden", "heads", "batch", "seqlen")}
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
        num_key_value_heads=scenario.heads,
        vocab_size=1024,
        max_position_embeddings=scenario.seqlen,
        use_cache=False,
    )
    model: nn.Module = LlamaModel(config).to(device, torch.bfloat16)
    return model.train(scenario.training)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One side of a scenario, and how long it is timed."""

    scenario: Scenario
    side: str
    device: str
    seconds: float


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
        out = step().float()
        row["lowerings"] = _lowerings()
        with lock:
            with torch.no_grad():
                exact = harness.main_output(model(input_ids=tokens)).float()
            row["difference"] = f"{float((out - exact).norm() / exact.norm()):.3g}"
            del out, exact
            torch.cuda.empty_cache()
            row["memory_gb"] = _most_memory(step, job.device)
    except Exception as failure:  # noqa: BLE001 (the row says so)
        return functools.partial(dict, row, failure=bench_kernels.reason(failure, []))
    return functools.partial(_finish, job, row, step)


def _most_memory(step: harness.Step, device: str) -> str:
    step()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f}"


def _finish(job: Job, row: dict[str, str], step: harness.Step) -> waves.Row:
    values = harness.interleave({job.side: step}, job.device, seconds=job.seconds, max_rounds=60)[job.side]
    p20, p50, p80 = harness.percentiles(values)
    return row | {"rounds": str(len(values)), "p20_ms": f"{p20:.3f}", "p50_ms": f"{p50:.3f}", "p80_ms": f"{p80:.3f}"}


def rows_of(found: Sequence[tuple[Job, waves.Row | None]]) -> list[dict[str, str]]:
    """All rows, with how many times as fast as bfloat16 each one is: as the mean of bfloat16's medians, measured first and last."""
    rows = [job.scenario.columns | {"side": job.side} | (row or {"failure": "not run"}) for job, row in found]
    for (job, _), row in zip(found, rows, strict=True):
        usual = [
            float(other["p50_ms"])
            for (of, _), other in zip(found, rows, strict=True)
            if of.scenario == job.scenario and of.side == BASELINE and "p50_ms" in other
        ]
        if usual and "p50_ms" in row:
            row["ratio"] = f"{sum(usual) / len(usual) / float(row['p50_ms']):.3f}"
    return rows


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
    parser.add_argument("--seconds", type=float, default=2.0, help="for each side")
    waves.add_arguments(parser, budget_seconds=600.0)
    parser.add_argument("--commit")
    given = parser.parse_args()
    device = "cuda"
    environment = harness.environment(device, given.commit)
    file = harness.CsvFile(given.output, [*COLUMNS, *environment], append=given.append)
    jobs = [
        Job(scenario=SCENARIOS[place], side=side, device=device, seconds=given.seconds)
        for place in given.scenarios
        for side in (*given.sides, *([BASELINE] if BASELINE in given.sides else []))
    ]
    until = time.monotonic() + given.budget_seconds
    found = waves.run(jobs, prepare, jobs=given.jobs, until=until, wave_seconds=given.wave_seconds)
    with Progress(console=Console(stderr=True)) as progress:
        done = list(progress.track(found, total=len(jobs), description="sides"))
    for row in rows_of(done):
        file.add(row | environment)
    print_table(file.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
