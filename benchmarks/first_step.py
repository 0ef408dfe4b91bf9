"""One fresh process of `bench_first_step`: build a model, call it compiled, and print what its first steps took, as JSON.

    python -m benchmarks.first_step '{"model": "llama", "call": "prefill", "length": 128, "batch": 2, "size": "small",
                                      "device": "cpu", "side": "attn_compiler"}'

first_seconds: to the end of the first forward (or forward and backward), with the import of what compiles. cpu_seconds: CPU time of the
process meanwhile, in all of its threads. import_seconds: of first_seconds, the import of our package. second_seconds: of the second step.
passes_seconds: in our passes. kernels_ahead, kernels_late: of our own Triton kernels, those that threads compiled while the graph was, and
those that their first launch had to; none of those were on disk. from_cache: graphs whose rewrite was on disk, of all graphs.
sites: by lowering.
"""

from __future__ import annotations

import contextlib
import cProfile
import importlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import first_step_cases, harness
from benchmarks.first_step_cases import CALLS, Size

#: what our backend imports at its first graph, whether or not its passes run
_OURS = ("attn_compiler.compiling.backend", "attn_compiler.lowerings", "attn_compiler.passes")


@dataclass(frozen=True, kw_only=True)
class Job:
    """side: the backend's name. profile: the file to write a profile of the first step to, if any."""

    model: str
    call: str
    length: int
    batch: int
    size: Size
    device: str
    side: str
    profile: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    first_seconds: float
    second_seconds: float
    cpu_seconds: float
    import_seconds: float
    passes_seconds: float
    kernels_ahead: int
    kernels_late: int
    from_cache: str
    sites: str


class Kernels:
    """Counts what Triton compiles of ours in this process, by thread. What it finds on disk does not count."""

    def __init__(self) -> None:
        self.ahead = self.late = 0

    def watch(self) -> None:
        import triton

        triton.knobs.compilation.listener = self

    def __call__(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit or not str(getattr(getattr(src, "fn", None), "__module__", "")).startswith("attn_compiler"):
            return
        if threading.current_thread().name == "attn_compiler":
            self.ahead += 1
        else:
            self.late += 1


def measure(job: Job) -> Measured:
    call = CALLS[job.call]
    dtype = torch.float32 if job.device == "cpu" else torch.bfloat16
    case: dict[str, Any] = {"dtype": dtype, "device": job.device}
    model = first_step_cases.build(job.model, call, job.size, job.length, **case)
    inputs = first_step_cases.inputs(job.model, call, job.size, job.length, job.batch, **case)
    kernels = Kernels()
    if job.device != "cpu":
        kernels.watch()
        torch.cuda.synchronize()
    with _profiled(job.profile):
        begin, began = time.perf_counter(), time.process_time()
        if job.side == harness.BACKEND:
            _import_ours()
        imported = time.perf_counter()
        model.compile(backend=job.side)
        step = harness.make_step(model, inputs, training=call.training)
        _run(step, job.device)
        first, done = time.perf_counter(), time.process_time()
    _run(step, job.device)
    second = time.perf_counter()
    return Measured(
        first_seconds=first - begin,
        second_seconds=second - first,
        cpu_seconds=done - began,
        import_seconds=imported - begin,
        kernels_ahead=kernels.ahead,
        kernels_late=kernels.late,
        **_reported(job),
    )


def _import_ours() -> None:
    """As the backend does at its first graph."""
    importlib.import_module(_OURS[0])
    from attn_compiler.torch_private import collector

    with collector.paused():
        for name in _OURS:
            importlib.import_module(name)


@contextlib.contextmanager
def _profiled(path: str) -> Iterator[None]:
    if not path:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    profile.dump_stats(path)


def _run(step: harness.Step, device: str) -> None:
    step()
    if device != "cpu":
        torch.cuda.synchronize()


def _reported(job: Job) -> dict[str, Any]:
    if job.side != harness.BACKEND:
        return {"passes_seconds": 0.0, "from_cache": "", "sites": ""}
    import attn_compiler

    reports, sites = attn_compiler.reports(), Counter[str]()
    for report in reports:
        for site in report.sites:
            sites[site.decision.lowering] += len(site.modules)
    seconds = sum(report.total_seconds for report in reports)
    return {
        "passes_seconds": seconds,
        "from_cache": f"{sum(report.from_cache for report in reports)}/{len(reports)}",
        "sites": ", ".join(f"{name} x{count}" for name, count in sorted(sites.items())),
    }


def main() -> None:
    print(json.dumps(asdict(measure(Job(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
