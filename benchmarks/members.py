"""Cases that several processes measure together, a GPU each: groups compile side by side, and are timed one after another.

A case has a group of processes. Each of them compiles and checks, then waits for its turn (`wait_for_turn`), and writes a row. Groups of
one wave compile at a time; their turns come one by one, once all of the wave are ready or have failed. What fails, dies or is too late is
told in its row, and costs no other case. Nothing is left running.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import harness

Row = dict[str, str]
#: what each process runs: its rank, the group's folder, the case
Target = Callable[[int, str, Any], None]

#: seconds between looks at files and processes
_LOOK = 0.05


def write(rank: int, folder: str, measure: Callable[[], Row]) -> None:
    """Write the row of this process, or how it failed: the process ends with 1 then."""
    try:
        row = measure()
    except Exception as error:  # noqa: BLE001 (the row names it)
        row = {"failure": harness.failure(error)}
    Path(folder, f"row_{rank}.json").write_text(json.dumps(row))
    if "failure" in row:
        sys.exit(1)


def wait_for_turn(rank: int, folder: str) -> None:
    """Say that this process is ready, and wait until its group may have the GPUs alone."""
    Path(folder, f"ready_{rank}").touch()
    while not Path(folder, "turn").exists():
        time.sleep(_LOOK)


@contextlib.contextmanager
def joined(rank: int, folder: str, processes: int, *, dry: bool) -> Iterator[tuple[DeviceMesh, str]]:
    """The group's mesh and this process's device, while it is in the process group: gloo on a CPU if dry, else NCCL and a GPU each."""
    torch.set_num_threads(1)
    kind, device = ("cpu", "cpu") if dry else ("cuda", f"cuda:{rank}")
    how: dict[str, Any] = {"store": _store(rank, Path(folder), processes), "rank": rank, "world_size": processes}
    if not dry:
        torch.cuda.set_device(rank)
        how["device_id"] = torch.device(device)
    dist.init_process_group("gloo" if dry else "nccl", **how)
    try:
        yield init_device_mesh(kind, (processes,)), device
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _store(rank: int, folder: Path, processes: int) -> dist.Store:
    """As torchrun's: ranks of a shared sequence meet in it before each call, and a file would cost them a millisecond."""
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, processes, is_master=True, wait_for_workers=False)
        made = folder / "port.new"
        made.write_text(str(store.port))
        made.rename(port)
        return store
    while not port.exists():
        time.sleep(_LOOK)
    return dist.TCPStore("localhost", int(port.read_text()), processes, is_master=False)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """together: groups that compile at a time. seconds: how long a wave may compile. turn_seconds: how long one group's turn may take."""

    together: int
    seconds: float
    turn_seconds: float


@dataclass(kw_only=True)
class _Group:
    """The processes of one case, and the folder where they write."""

    case: Any
    folder: str
    processes: list[BaseProcess]

    def is_over(self) -> bool:
        """Whether no process runs any more, or one failed, which the others would wait for."""
        return any(process.exitcode for process in self.processes) or not any(
            process.is_alive() for process in self.processes
        )

    def is_ready(self) -> bool:
        """Whether all processes wait for their turn."""
        return all(Path(self.folder, f"ready_{rank}").exists() for rank in range(len(self.processes)))

    def end(self) -> None:
        """Leave no process."""
        for process in self.processes:
            process.kill()
            process.join()

    def row(self, failure: str) -> Row:
        """What the first process wrote, or how one of them failed. failure: why the group was ended."""
        files = [Path(self.folder, f"row_{rank}.json") for rank in range(len(self.processes))]
        rows: list[Row] = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        told = [f"rank {rank}: {row['failure']}" for rank, row in enumerate(rows) if "failure" in row]
        if told:
            return {"failure": told[0]}
        if failure:
            return {"failure": failure}
        if not all(rows):
            return {"failure": f"a process died, exit codes {[process.exitcode for process in self.processes]}"}
        return rows[0]


def rows(
    cases: Sequence[Any], target: Target, *, processes: int, limits: Limits, until: float, imports: Sequence[str]
) -> Iterator[tuple[Any, Row]]:
    """Each case with its row, as soon as it is there. No wave begins after `until`, of time.monotonic().

    processes: of each group. imports: modules that processes are forked with.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imports))
    for first in range(0, len(cases), limits.together):
        if time.monotonic() > until:
            return
        with tempfile.TemporaryDirectory() as folder:
            wave: list[_Group] = []
            try:
                for case in cases[first : first + limits.together]:
                    own = Path(folder, str(len(wave)))
                    own.mkdir()
                    ranks = [context.Process(target=target, args=(rank, str(own), case)) for rank in range(processes)]
                    for process in ranks:
                        process.start()
                    wave.append(_Group(case=case, folder=str(own), processes=ranks))
                yield from _finished(wave, limits)
            finally:
                for group in wave:
                    group.end()


def _finished(wave: Sequence[_Group], limits: Limits) -> Iterator[tuple[Any, Row]]:
    _wait(lambda: all(group.is_over() or group.is_ready() for group in wave), limits.seconds)
    late = f"TimeoutError: not ready after {limits.seconds:.0f} s"
    slow = f"TimeoutError: not timed within {limits.turn_seconds:.0f} s"
    for group in wave:
        if not group.is_over() and not group.is_ready():
            group.end()
            yield group.case, group.row(late)
            continue
        Path(group.folder, "turn").touch()
        in_time = _wait(group.is_over, limits.turn_seconds)
        group.end()
        yield group.case, group.row("" if in_time else slow)


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK)
    return True
