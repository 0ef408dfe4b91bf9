"""Two processes of one group over gloo, each of which runs one function and hands back what that gives."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from tests import quick_tracing

SIZE = 2
_SECONDS = 280


def run(function: Callable[..., Any], *args: Any) -> list[Any]:
    """function(*args) in both processes, the results by rank. What one of them raises is raised here."""
    with tempfile.TemporaryDirectory() as directory:
        context = torch.multiprocessing.start_processes(
            _member, args=(directory, function, args), nprocs=SIZE, join=False, start_method="spawn"
        )
        try:
            deadline = time.monotonic() + _SECONDS
            # It returns whenever one process is done.
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{function.__name__} was not done after {_SECONDS} s")
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(_result(directory, rank), weights_only=False) for rank in range(SIZE)]


def _result(directory: str, rank: int) -> Path:
    return Path(directory) / f"result_{rank}.pt"


def _member(rank: int, directory: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    quick_tracing.install()
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=SIZE)
    try:
        torch.save(function(*args), _result(directory, rank))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
