"""Processes train one model: DDP, FSDP2 and tensor parallelism, our backend beside Inductor's own in the same processes.

    python -m benchmarks.bench_parallel --together 5
    python -m benchmarks.bench_parallel --ways tp tp_sequence --models llama --append
    python -m benchmarks.bench_parallel --ranks 4 --append
    python -m benchmarks.bench_parallel --tiny --output /tmp/parallel.csv

A row is a way (benchmarks/parallel_cases.py) and a model: a training step of padded sequences with labels, in bfloat16, over NCCL, a GPU
each. Each row has processes of its own, --ranks; what fails or takes longer than --way-seconds is told in its row, and costs no other. Rows
compile --together at a time and are timed one after another (members.py): first seconds are those of a busy machine then. Two copies of
the model, prepared alike, are compiled by Inductor and by us, and timed in turn; numbers are those of the first process.
`attentions` is how many the model has; layers that are compiled one by one share a site, and the profiler's launches say what ran.
`gradient_difference` is the largest over the parameters, to the same step uncompiled, in the norm; `loss_difference` is relative.
--tiny: a dry run on a CPU over gloo, without Inductor. Writes benchmarks/results/parallel_gpus.csv. Exits with 1 where an attention was
missed, a mask was not proved, or something is slower, wrong or failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import attn_compiler
from benchmarks import bench_h200, compare, found, harness, members, parallel_cases
from benchmarks.harness import BACKEND, BASELINE, Step
from benchmarks.models import Size
from benchmarks.parallel_cases import MODELS, WAYS, Context

RESULTS = Path(__file__).parent / "results" / "parallel_gpus.csv"
KEYS = ("way", "model", "batch", "length", "ranks")
DIFFERENCES = tuple(f"{prefix}{what}_difference" for what in ("loss", "gradient") for prefix in ("", f"{BASELINE}_"))
COLUMNS = (
    *KEYS,
    "attentions",
    *found.COLUMNS,
    "rounds",
    *(f"{side}_{p}_ms" for side in (BASELINE, BACKEND) for p in ("p20", "p50", "p80")),
    "ratio",
    *(f"{side}_first_seconds" for side in (BASELINE, BACKEND)),
    *DIFFERENCES,
    "numerics",
    *bench_h200.KERNELS,
    "failure",
)
IMPORTS = (*bench_h200.IMPORTS, "benchmarks.parallel_cases")
#: what orders of summation do to a gradient, where Inductor's side happens to be nearer
_NOISE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A row to measure. dry: on a CPU, small, without Inductor. rounds: of timing, the same in each process."""

    way: str
    model: str
    rounds: int
    ranks: int = 2
    dry: bool = False

    @property
    def size(self) -> Size:
        return "small" if self.dry else "full"

    @property
    def names(self) -> dict[str, str]:
        batch, length = parallel_cases.SHAPES[self.size]
        return dict(zip(KEYS, (self.way, self.model, str(batch), str(length), str(self.ranks)), strict=True))


# ---- one process ----------------------------------------------------------------------------------------------------


def member(rank: int, folder: str, job: Job) -> None:
    """One process of a row: writes the row, or with how it failed. Ends with 1 then."""
    members.write(rank, folder, lambda: _joined(rank, folder, job), bench_h200.failure)


def _joined(rank: int, folder: str, job: Job) -> dict[str, str]:
    with members.joined(rank, folder, job.ranks, dry=job.dry) as (mesh, device):
        context = Context(name=job.model, size=job.size, mesh=mesh, device=device)
        return measure(job, context, ready=lambda: members.wait_for_turn(rank, folder))


def measure(job: Job, context: Context, *, ready: Callable[[], None] = lambda: None) -> dict[str, str]:
    """The row, but for its names. Each process of the group calls it. ready: called once all is compiled, before anything is timed."""
    # Layers of two models share their code, and each model may need several compilations of it.
    torch._dynamo.config.recompile_limit = 64
    row = {"attentions": str(context.layers)}
    seed = dist.get_rank() if WAYS[job.way].own_data else 0
    given = parallel_cases.batch(job.model, job.size, context.device, seed)
    steps, numbers = _compiled(job, context, given, row)
    row |= found.columns(attn_compiler.reports()) | _differences(numbers)
    numbers.clear()
    if context.device != "cpu":
        torch.cuda.empty_cache()
    ready()
    row |= harness.timing_columns(harness.interleave(steps, context.device, seconds=0.0, min_rounds=job.rounds))
    if context.device != "cpu":
        row |= bench_h200.kernel_columns(steps, row["lowerings"])
    return row


Numbers = tuple[Tensor, dict[str, Tensor]]


def _compiled(
    job: Job, context: Context, given: Mapping[str, Tensor], row: dict[str, str]
) -> tuple[dict[str, Step], dict[str, Numbers]]:
    """A step of each side, and loss and gradients of the first one of each, and of one that was not compiled ("")."""
    way, inner = WAYS[job.way], "aot_eager" if job.dry else BASELINE
    backends = {BASELINE: inner, BACKEND: BACKEND}
    steps: dict[str, Step] = {}
    numbers: dict[str, Numbers] = {}
    dry: dict[str, str] | None = {"inner": inner} if job.dry else None
    compare.warm_up(context.device, {inner: None, BACKEND: dry})
    for side, backend in backends.items():
        model = way.prepare(parallel_cases.build(job.model, job.size, context.device), context)
        step = parallel_cases.training_step(model, given)
        if not numbers:
            numbers[""] = step(), parallel_cases.gradients(model)
        parallel_cases.compile_in_place(model, way, backend, dry if backend == BACKEND else None)
        begin = time.perf_counter()
        loss = float(step())
        row[f"{side}_first_seconds"] = f"{time.perf_counter() - begin:.2f}"
        numbers[side] = torch.tensor(loss), parallel_cases.gradients(model)
        model.zero_grad(set_to_none=True)
        steps[side] = step
    return steps, numbers


def _differences(numbers: Mapping[str, Numbers]) -> dict[str, str]:
    """DIFFERENCES and `numerics`: whether ours is at most twice as far from the uncompiled step as Inductor's, up to noise."""
    loss, wanted = numbers[""]
    losses, gradients = {}, {}
    for side in (BACKEND, BASELINE):
        losses[side] = abs(float(numbers[side][0]) / float(loss) - 1)
        gradients[side] = parallel_cases.largest_difference(numbers[side][1], wanted)
    noise = _NOISE[torch.float32 if next(iter(wanted.values())).device.type == "cpu" else torch.bfloat16]
    good = all(x[BACKEND] <= 2 * x[BASELINE] + noise for x in (losses, gradients))
    values = (x[side] for x in (losses, gradients) for side in (BACKEND, BASELINE))
    columns = {name: f"{value:.3g}" for name, value in zip(DIFFERENCES, values, strict=True)}
    return columns | {"numerics": "ok" if good else "WRONG"}


# ---- rows -----------------------------------------------------------------------------------------------------------


def is_short(row: Mapping[str, str]) -> bool:
    """Whether something is not as it should be."""
    if row.get("failure"):
        return True
    shared = WAYS[row["way"]].is_shared
    missing = row["sites"] == "0" if shared else row["sites"] != row["attentions"]
    slow = float(row["ratio"]) < harness.MIN_RATIO
    wrong = row["numerics"] == "WRONG" or row.get("pinned") == "NO"
    return missing or row["misses"] != "0" or row["dense"] != "0" or slow or wrong


def said(row: Mapping[str, str]) -> str:
    """A row, for people."""
    words = f"{row['way']} {row['model']}: "
    if row.get("failure"):
        return words + f"FAILED, {row['failure']}"
    words += f"{row['sites']} sites of {row['attentions']} attentions, {row['misses']} missed, {row['proved']} proved, "
    words += f"{row['dense']} dense; {row['lowerings']}; Inductor {row[f'{BASELINE}_p50_ms']} ms, "
    words += f"ours {row[f'{BACKEND}_p50_ms']}, ratio {row['ratio']}; "
    words += ", ".join(f"{name} {row[name]}" for name in (*DIFFERENCES, "numerics"))
    return words + (f"\n    why: {row['why']}" if row["why"] else "")


def means(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines for people: geometric means by way, and of all."""
    good = [row for row in rows if row.get("ratio")]
    of_ways = {way: [row for row in good if row["way"] == way] for way in WAYS}
    return [
        f"{name}: {len(some)} rows, ratio {statistics.geometric_mean(float(row['ratio']) for row in some):.3f}"
        for name, some in {**of_ways, "all": good}.items()
        if some
    ]


def main() -> int:
    """Measure, print and write; 0 where every row is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, a GPU each (%(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20, help="of timing (%(default)s)")
    parser.add_argument("--together", type=int, default=1, help="rows that compile at a time (%(default)s)")
    parser.add_argument(
        "--way-seconds", type=float, default=150.0, help="how long rows may compile, and each be timed (%(default)s)"
    )
    parser.add_argument("--budget-seconds", type=float, default=480.0, help="begin no row after that (%(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the rows of the file and measure only the others")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to name in the rows, where this is no checkout")
    options = parser.parse_args()

    until = time.monotonic() + options.budget_seconds
    where = harness.environment("cpu" if options.tiny else "cuda:0", options.commit)
    file = harness.CsvFile(options.output, [*COLUMNS, *where], append=options.append)
    done = {(row["way"], row["model"], row["ranks"]) for row in file.rows}
    jobs = [
        Job(way=way, model=model, rounds=options.rounds, ranks=options.ranks, dry=options.tiny)
        for way in options.ways
        for model in options.models
        if (way, model, str(options.ranks)) not in done
    ]
    limits = members.Limits(together=options.together, seconds=options.way_seconds, turn_seconds=options.way_seconds)
    begin, left = time.monotonic(), list(jobs)
    for job, found_row in members.rows(
        jobs, member, processes=options.ranks, limits=limits, until=until, imports=IMPORTS
    ):
        row = job.names | found_row
        left.remove(job)
        file.add(row | where)
        print(f"at {time.monotonic() - begin:.0f} s, {said(row)}", flush=True)
    for job in left:
        print(f"{job.way} {job.model}: left for a run with --append")
    print("\n".join(means(file.rows)))
    return int(any(map(is_short, file.rows)))


if __name__ == "__main__":
    sys.exit(main())
