"""Hybrid models of 4 layers, whole: a prompt of 2 x 4096 tokens and a training step of 1 x 4096.

    python -m benchmarks.bench_hybrids --jobs 8 --size small --device cpu     # a look at the script
    python -m benchmarks.bench_hybrids --jobs 8                               # on a GPU
    python -m benchmarks.bench_hybrids --jobs 8 --sides library --append      # with flash-linear-attention installed

All sides have the same weights. Each is compiled in a process of its own, beside the others, and timed alone. "ours", "ours fla": our
backend in both precisions. "library": Inductor around flash-linear-attention's functions, which transformers takes where they are
installed; ours then leaves them alone, so this side needs a run of its own. "eager": without a compiler. `first_s`: compilation and first
step. `error`: ‖gradients or outputs - those in float32‖ / ‖those in float32‖, where
float32 finds the memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

import attn_compiler
from benchmarks import bench_h200, compare, harness, models, waves
from benchmarks.harness import BACKEND, BASELINE, Bench, arg, failure

HYBRIDS = {name: models._family(name, **given) for name, given in models.read("hybrids.toml").items()}
SIDES = ("ours", "ours fla", "eager", "inductor", "library")
COLUMNS = (
    *("model", "scenario", "side", "inputs", "linear", "lowerings", "rounds", "p20_ms", "p50_ms", "p80_ms"),
    *("over_ours", "first_s", "peak_mib", "error", "failure"),
)


@dataclass(frozen=True, kw_only=True)
class Hybrid(harness.Named):
    """A family of hybrids.toml, "prefill" or "train", and one of SIDES."""

    model: str
    scenario: str
    side: str


def compiled(side: str, model: Any) -> Any:
    """Return the model as the side runs it."""
    if side == "eager":
        return model
    if side in ("inductor", "library"):
        return torch.compile(model, backend=BASELINE, dynamic=False)
    options = {"linear_precision": "fla"} if side == "ours fla" else None
    return torch.compile(model, backend=BACKEND, dynamic=False, options=options)


def prepare(what: tuple[Hybrid, Namespace], lock: AbstractContextManager[Any]) -> waves.Finish:
    """Compile a side of a model, and compare with float32. Whatever fails becomes the row's `failure`."""
    asked, given = what
    device, training = given.device, asked.scenario == "train"
    models.FAMILIES = {**models.FAMILIES, **HYBRIDS}
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        has_library = importlib.util.find_spec("fla") is not None
        if has_library != (asked.side == "library"):
            raise ModuleNotFoundError(
                "the library's side, and no other, is measured where flash-linear-attention is installed"
            )
        torch.compiler.reset()
        attn_compiler.reset()
        torch.compile(torch.sin)(torch.ones(8, device=device))  # What a process pays once is no side's first step.
        shape = HYBRIDS[asked.model].sizes[given.size]
        rows = 1 if training else shape.batch
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 1000, (rows, shape.seqlen), generator=generator).to(device)
        model = models.build(asked.model, given.size, "sdpa", torch.bfloat16, device).train(training)
        case = compare.Case(
            model=model, inputs={"input_ids": ids, "use_cache": False}, device=device, training=training
        )
        step = case.step(compiled(asked.side, model))
        # Models' own functions take up to 128 GiB, so one side at a time has them.
        with lock if asked.side in ("eager", BASELINE) else contextlib.nullcontext():
            begun = time.monotonic()
            step()
            harness.synchronize(device)
            row = {"first_s": f"{time.monotonic() - begun:.1f}", "inputs": "x".join(map(str, ids.shape))}
            bench_h200.forget(case, device)
        if asked.side.startswith("ours"):
            row["lowerings"] = compare.chosen(attn_compiler.reports())["lowerings"]
            linear = [one.decision.lowering for report in attn_compiler.reports() for one in report.linear]
            row["linear"] = " ".join(sorted(set(linear)))
        with lock, contextlib.suppress(torch.cuda.OutOfMemoryError):
            precise = models.build(asked.model, given.size, "sdpa", torch.bfloat16, device).train(training).float()
            expected = compare.results(case, precise, case.step(precise))
            row["error"] = f"{compare.relative_error(compare.results(case, model, step), expected):.3g}"
            del precise, expected
        bench_h200.forget(case, device)
    except Exception as error:  # noqa: BLE001 (a library that is not there or fails costs its own row alone)
        failed = {"failure": failure(error)}
        return lambda: failed
    return functools.partial(_finish, asked, given, case, step, row)


def _finish(
    asked: Hybrid, given: Namespace, case: compare.Case, step: harness.Step, row: dict[str, str]
) -> dict[str, str]:
    """The rest of a row."""
    times = harness.interleave({asked.side: step}, given.device, seconds=given.seconds)[asked.side]
    low, middle, high = (f"{ms:.4g}" for ms in harness.percentiles(times))
    row |= {"rounds": str(len(times)), "p20_ms": low, "p50_ms": middle, "p80_ms": high}
    if given.device != "cpu":
        bench_h200.forget(case, given.device)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        harness.synchronize(given.device)
        row["peak_mib"] = f"{(torch.cuda.max_memory_allocated() - held) / 2**20:.0f}"
        bench_h200.forget(case, given.device)
    return row


def rows(cases: Sequence[Hybrid], given: Namespace) -> harness.Measured:
    """Of sides as they come: all are compiled before any is timed."""
    asked, medians = waves.asked(given), dict[tuple[str, str], float]()
    for (case, _), row in waves.run(
        [(case, given) for case in cases], prepare, until=given.until, imports=bench_h200.IMPORTS, **asked
    ):
        found, key = {**case.names, **(row or {})}, (case.model, case.scenario)
        if "p50_ms" in found:
            if case.side == "ours":
                medians[key] = float(found["p50_ms"])
            if key in medians:
                found["over_ours"] = f"{float(found['p50_ms']) / medians[key]:.3f}"
        yield [found]


BENCH = Bench(
    doc=__doc__, results="hybrids_h200.csv", columns=COLUMNS, rows=rows, sides=SIDES,
    cases=lambda given: [
        Hybrid(model=name, scenario=scenario, side=side)
        for side in given.sides for scenario in given.scenarios for name in given.models
    ],
    options=(
        arg("--models", nargs="+", default=list(HYBRIDS)), arg("--sides", nargs="+", default=list(SIDES[:3])),
        arg("--scenarios", nargs="+", default=["prefill", "train"]),
    ),
    seconds=2.0, budget=200.0, sized=True, jobs=True, where=bench_h200.where,
    short=("model", "scenario", "side", "p50_ms", "over_ours", "first_s", "peak_mib", "error", "linear", "failure"),
)  # fmt: skip
main = harness.run(BENCH)

if __name__ == "__main__":
    sys.exit(main())
