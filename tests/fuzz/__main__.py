"""Random attention programs, each held against eager: python -m tests.fuzz --minutes 10 --seed 1 --processes 2

What goes wrong is made small and written as a test into --out, with all that was said of it. The tally is printed, and written as JSON
with --report. The exit code is 1 if something went wrong, 2 if more programs were discarded than may be.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz import crew, environment
from tests.fuzz.batch import Batch, Begun
from tests.fuzz.crew import Ended, Limits, Lost
from tests.fuzz.grammar.rules import CUDA_LOWERINGS, LOWERINGS, RULES
from tests.fuzz.program import Program
from tests.fuzz.reporting import Log, say
from tests.fuzz.searching import Found, Kind
from tests.fuzz.tally import Tally

#: programs that a process draws of one rule before it goes on to the next
BATCH = 25
#: the share of programs that may say nothing
DISCARDED = 0.25
#: seconds of CPU time that one program may take; on a GPU its kernels are compiled in them
SECONDS = {"cpu": 25.0, "cuda": 120.0}
#: rounds of which one has small sizes on a GPU, where most of its kernels refuse them
SMALL_ONE_IN = 4


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--programs", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lowering", help="this one alone; without it several, some of them in turn")
    parser.add_argument(
        "--interpret", action="store_true", help="every program by Triton's kernels, interpreted on the CPU"
    )
    parser.add_argument(
        "--inner", choices=("eager", "aot_eager", "inductor"), help="what compiles the rest of each program"
    )
    parser.add_argument("--rule", action="append", choices=sorted(RULES), help="this generator alone; may be repeated")
    parser.add_argument("--batch", type=int, default=BATCH, help="programs of one rule that are drawn together")
    parser.add_argument("--shrinking", type=float, default=40.0, help="seconds to make one finding small")
    parser.add_argument("--seconds", type=float, help="CPU time that one program may take")
    parser.add_argument("--silence", type=float, default=240.0, help="seconds after which a program hangs")
    parser.add_argument("--memory", type=float, help="GiB that one process may hold")
    parser.add_argument("--discarded", type=float, default=DISCARDED, help="share of programs that may say nothing")
    parser.add_argument("--report", type=Path, help="write the tally here, as JSON")
    parser.add_argument("--out", type=Path, default=Path("tests/fuzz/found"))
    options = parser.parse_args(given)
    if options.interpret and options.device != "cpu":
        parser.error("--interpret is for the CPU")
    return options


def lowerings(options: argparse.Namespace) -> tuple[tuple[str, ...] | None, ...]:
    if options.lowering is not None:
        return ((options.lowering,),)
    if options.interpret:
        return (("triton", "reference"),)
    return LOWERINGS if options.device == "cpu" else CUDA_LOWERINGS


def batches(options: argparse.Namespace, until: float) -> Iterator[Batch]:
    """Every rule in turn, until the time or the programs are over."""
    left, round_ = options.programs, 0
    while left > 0:
        large = options.device != "cpu" and round_ % SMALL_ONE_IN != SMALL_ONE_IN - 1
        for rule in options.rule or RULES:
            examples = min(options.batch, left)
            left -= examples
            if time.monotonic() > until or examples <= 0:
                return
            yield Batch(
                kind=Kind(
                    rule=rule, lowerings=lowerings(options), device=options.device, large=large, inner=options.inner
                ),
                seed=zlib.crc32(f"{options.seed} {rule} {round_}".encode()),
                examples=examples,
                until=until,
                shrinking=options.shrinking,
                limit=options.seconds or SECONDS[options.device],
                gpu_share=0.9 / options.processes,
            )
        round_ += 1


def limits(options: argparse.Namespace) -> Limits:
    """On a GPU each process starts anew: CUDA can't be used in a fork of a process that used it."""
    memory = 0.8 * crew.total_memory() / options.processes
    return Limits(
        processes=options.processes,
        method="forkserver" if options.device == "cpu" else "spawn",
        silence=options.silence,
        memory=int(options.memory * 2**30) if options.memory else int(min(memory, 8 * 2**30)),
        renewed=12 if options.device == "cpu" else 40,
        logs=options.out / "logs",
    )


def run(options: argparse.Namespace, log: Log) -> None:
    """Everything that is told goes into the log."""
    until = time.monotonic() + options.minutes * 60
    last: dict[Batch, Program] = {}
    first: dict[Batch, Found] = {}
    with environment.prepared(options.device):
        for batch, told in crew.events(batches(options, until), limits(options)):
            if isinstance(told, Begun):
                last[batch] = told.program
            elif isinstance(told, Tally):
                log.tally.join(told)
            elif isinstance(told, Found):
                # As it was at first, and then made small.
                if batch in first:
                    del first[batch]
                    log.found(told)
                else:
                    first[batch] = told
            elif isinstance(told, Ended | Lost):
                _over(batch, told, last.pop(batch, None), first.pop(batch, None), log)
            log.go_on()


def _over(batch: Batch, told: Ended | Lost, last: Program | None, first: Found | None, log: Log) -> None:
    """What is left of a batch: a finding that was not made small, a program that a process was lost with, an error of the fuzzer."""
    if first is not None:
        log.found(first)
    elif isinstance(told, Lost) and last is not None:
        log.tally.drawn(last)
        log.tally.wrong(batch.kind.rule)
        log.found(Found(program=last, kind=told.kind, text=told.text, seconds=0.0))
    elif told.text is not None:
        log.failed(f"{batch.kind.rule}, seed {batch.seed}: {told.text}")


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    log = Log(
        out=options.out,
        report=options.report,
        about={"seed": options.seed, "processes": options.processes, "device": options.device},
    )
    try:
        run(options, log)
    except KeyboardInterrupt:
        say("interrupted")
    log.end()
    if log.sorts or log.failures:
        return 1
    if log.tally.discarded > options.discarded or not log.tally.total["compared"]:
        say(f"too many programs say nothing: {100 * log.tally.discarded:.0f}% were discarded")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
