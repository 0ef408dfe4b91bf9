"""What the fuzzer finds of faults that were planted on purpose: python -m tests.fuzz.recall --minutes 60 --jobs 2

The programs are drawn once, every rule in turn, without knowing of any fault, and run on the code as it is; those that it gets right are
what a fault has to be found by, in that order. A fault is put into a process of its own, where our package is not imported yet or, if the
fault is in one function, where that function is exchanged. Programs that do not run the function are passed over: they would give what they
gave.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import multiprocessing
import multiprocessing.connection
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.utils.checkpoint

from tests.fuzz import corpus, searching
from tests.fuzz.__main__ import say
from tests.fuzz.comparing import Left, Wrong
from tests.fuzz.corpus import Known
from tests.fuzz.planted import FAULTS, KERNELS, Fault, plant, swap


@dataclass(frozen=True, kw_only=True)
class Tried:
    """found: by which kind of failure, None so far. programs: how many were run. place: in the order, of the last one. seconds: CPU."""

    fault: Fault
    found: str | None
    programs: int
    place: int
    seconds: float
    rule: str = ""
    text: str = ""


# ---- faults ----------------------------------------------------------------------------------------------------------------


def concerned(fault: Fault, order: Sequence[Known]) -> list[int]:
    """The places of the programs that can come out otherwise."""
    if fault.file.startswith(KERNELS):
        return [i for i, known in enumerate(order) if "triton" in known.lowered]
    place = fault.place()
    if place is None:
        return list(range(len(order)))
    return [i for i, known in enumerate(order) if (fault.file, place) in known.ran]


def attempt(fault: Fault, order: Sequence[Known], places: Iterable[int], seconds: float) -> Tried:
    """Run programs on the code with the fault until one goes wrong or the CPU time is over. In a process of its own."""
    corpus.quiet()
    if "attn_compiler" not in sys.modules:
        plant(fault)
    elif not swap(fault):
        raise RuntimeError(f"{fault.name} can't be put into a package that is imported")
    start, count, last = time.process_time(), 0, -1
    for place in places:
        spent = time.process_time() - start
        if spent > seconds:
            break
        last, count = place, count + 1
        try:
            searching.judged(order[place].program)
        except Left:
            continue
        except Wrong as wrong:
            spent = time.process_time() - start
            rule = order[place].program.rule
            return Tried(
                fault=fault,
                found=wrong.kind,
                programs=count,
                place=place,
                seconds=spent,
                rule=rule,
                text=str(wrong)[:200],
            )
    return Tried(fault=fault, found=None, programs=count, place=last, seconds=time.process_time() - start)


def forked(function: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
    """(process, pipe) of a call in a fork of this process: what was imported is there, and what it does to its modules stays there."""
    context = multiprocessing.get_context("fork")
    ours, its = context.Pipe(duplex=False)

    def call() -> None:
        try:
            its.send(function(*given))
        except BaseException as error:  # noqa: BLE001 (whatever a fault breaks is a finding)
            its.send(error)

    process = context.Process(target=call, daemon=True)
    process.start()
    its.close()
    return process, ours


def tried(
    faults: Sequence[tuple[Fault, list[int]]], order: Sequence[Known], *, seconds: float, jobs: int, until: float
) -> Iterator[Tried]:
    """Each fault in turn, `jobs` at a time."""
    waiting, running = list(faults), []
    while (waiting or running) and time.monotonic() < until:
        while waiting and len(running) < jobs:
            fault, places = waiting.pop(0)
            running.append((fault, *forked(attempt, fault, order, places, seconds)))
        ready = multiprocessing.connection.wait([pipe for _, _, pipe in running], timeout=5)
        for entry in [entry for entry in running if entry[2] in ready]:
            running.remove(entry)
            fault, process, pipe = entry
            try:
                result = pipe.recv()
            except EOFError:
                result = Tried(fault=fault, found="crash", programs=0, place=-1, seconds=0.0)
            process.join()
            if isinstance(result, BaseException):
                result = Tried(
                    fault=fault, found="does not run", programs=0, place=-1, seconds=0.0, text=repr(result)[:200]
                )
            yield result
    for _, process, _ in running:
        process.kill()


def _warm() -> None:
    """What torch imports at its first compilation, so that no fork has to."""
    torch.compile(lambda x: x.softmax(-1) @ x, backend="aot_eager", fullgraph=True)(
        torch.ones(2, 2, requires_grad=True)
    ).sum().backward()
    torch._dynamo.reset()


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.recall", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="for all faults; drawing the programs is not counted"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=12, help="how often every rule has its turn")
    parser.add_argument("--fault", action="append", help="part of the name of a fault; may be repeated")
    parser.add_argument("--programs", type=Path, help="keep the programs here, and take them from here")
    parser.add_argument("--report", type=Path, help="write the result here, as JSON")
    options = parser.parse_args(given)
    order = _order(options)
    faults = [f for f in FAULTS if options.fault is None or any(part in f.name for part in options.fault)]
    _warm()
    start = time.monotonic()
    until = start + options.minutes * 60
    share = options.minutes * 60 * options.jobs / max(len(faults), 1)
    results: list[Tried] = []
    for are_cold in (True, False):
        if not are_cold:
            _import_ours(order)
        chosen = [(f, concerned(f, order)) for f in faults if _is_cold(f) is are_cold]
        # One by one: each is said as soon as it is known.
        for result in tried(chosen, order, seconds=share, jobs=options.jobs, until=until):
            results.append(result)
            said = f"found ({result.found}, {result.rule})" if result.found else "NOT FOUND"
            spent = f"after {result.programs} programs, {result.seconds:.1f} s"
            say(f"{time.monotonic() - start:6.0f} s  {result.fault.name}: {said} {spent}")
    found = [r for r in results if r.found]
    missed = [r for r in results if not r.found]
    say(
        f"recall: {len(found)} of {len(results)} faults, {100 * len(found) / max(len(results), 1):.1f}%; {len(order)} programs"
    )
    for r in missed:
        say(f"  not found: {r.fault.name} ({r.fault.file}, {r.fault.within}): {r.fault.why}; {r.programs} programs")
    if options.report is not None:
        options.report.write_text(json.dumps(_plain(results, order), indent=1) + "\n")
    return 0 if len(found) >= 0.95 * len(faults) else 1


def _is_cold(fault: Fault) -> bool:
    """Whether it has to be there when our package is imported."""
    return fault.place() is None or fault.file.startswith(KERNELS)


def _import_ours(order: Sequence[Known]) -> None:
    """Our package and what it imports late, so that no fork has to."""
    corpus.quiet()
    lowerings = {name: known for known in reversed(order) for name in known.lowered}
    for known in [*order[:3], *lowerings.values()]:
        searching.judged(known.program)


def _order(options: argparse.Namespace) -> list[Known]:
    if options.programs is not None and options.programs.exists():
        order: list[Known] = pickle.loads(options.programs.read_bytes())
        return order
    time.monotonic()
    _warm()
    order = corpus.programs(seed=options.seed, rounds=options.rounds, jobs=options.jobs, keep=options.programs)
    return order


def _plain(results: Sequence[Tried], order: Sequence[Known]) -> dict[str, Any]:
    rows = [
        {
            "fault": r.fault.name,
            "file": r.fault.file,
            "rule": r.fault.rule,
            "found": r.found,
            "by": r.rule,
            "programs": r.programs,
        }
        | {"place": r.place, "seconds": round(r.seconds, 1), "text": r.text}
        for r in results
    ]
    return {
        "programs": len(order),
        "faults": len(results),
        "found": sum(r.found is not None for r in results),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
