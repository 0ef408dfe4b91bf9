"""Processes of one group over gloo, each of which runs one function and hands back what that gives.

All are forks of a process that has imported what the function needs, so that nothing is imported twice.
"""

from __future__ import annotations

import gc
import importlib
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from tests import fresh, quick

SIZE = 2
_SECONDS = 280

#: what a first compilation imports of this package
_IMPORTED_LATE = (
    "attn_compiler.compiling.backend",
    "attn_compiler.reporting.publishing",
    "attn_compiler.context_parallel.collectives",
    "attn_compiler.lowerings.shared.launching.ahead",
)

_START = "import sys; from tests.distributed import processes; processes.start(sys.argv[1])"


def run(function: Callable[..., Any], *args: Any, size: int = SIZE) -> list[Any]:
    """function(*args) in `size` processes, the results by rank. What one of them raises is raised here."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "job").write_bytes(pickle.dumps((function, args, size)))
        fresh.run(_START, directory)
        return [torch.load(_result(directory, rank), weights_only=False) for rank in range(size)]


def run_each(function: Callable[..., Any], jobs: Sequence[Any], size: int = SIZE) -> list[list[Any]]:
    """Of each job its results by rank. function: takes all jobs at once, since to start ranks costs as much as a job."""
    by_rank = run(function, jobs, size=size) if jobs else []
    return [[results[i] for results in by_rank] for i in range(len(jobs))]


def results_by_name(function: Callable[..., Any], runs: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the results by rank of runs, by their names. Runs on as many ranks share one start."""
    found: dict[str, list[Any]] = {}
    for ranks in sorted({run.ranks for run in runs}):
        own = [run for run in runs if run.ranks == ranks]
        found |= dict(zip((run.name for run in own), run_each(function, own, size=ranks), strict=True))
    return found


def start(directory: str) -> None:
    """In a process that has nothing else to do. Where there is CUDA its forks could not use it."""
    function, args, size = pickle.loads((Path(directory) / "job").read_bytes())
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    from attn_compiler.passes.pipeline import running, steps

    running.load(steps.PIPELINE)
    gc.freeze()
    method = "spawn" if torch.cuda.is_available() else "fork"
    context = torch.multiprocessing.start_processes(
        _member, args=(directory, size, function, args), nprocs=size, join=False, start_method=method
    )
    try:
        deadline = time.monotonic() + _SECONDS
        # It returns whenever one process is done.
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                sys.exit(f"{function.__name__} was not done after {_SECONDS} s")
    finally:
        for process in context.processes:
            process.kill()


def _result(directory: str, rank: int) -> Path:
    return Path(directory) / f"result_{rank}.pt"


def _member(rank: int, directory: str, size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    quick.install()
    quick.install_in_imported()
    quick.one_after_another(Path(directory) / "compiling")
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    try:
        torch.save(function(*args), _result(directory, rank))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
