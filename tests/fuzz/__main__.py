"""Random attention programs, each held against eager: python -m tests.fuzz --minutes 10 --seed 1 --jobs 2

What goes wrong is made small and written as a test into --out. The tally is printed, and written as JSON with --report.
"""

from __future__ import annotations

import os

# Without a GPU the Triton kernels run in Triton's interpreter, which has to be known before they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import logging
import multiprocessing
import sys
import time
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.utils.checkpoint

from tests.fuzz import searching, writing
from tests.fuzz.grammar.rules import CUDA_LOWERINGS, LOWERINGS, RULES
from tests.fuzz.searching import Found, Kind
from tests.fuzz.tally import Tally

#: programs that a worker draws of one rule before it goes on to the next
BATCH = 25
#: batches after which a worker is replaced: what compiling leaves behind is not all given back
RENEWED = 12


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--programs", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--lowering", help="this one alone; without it several, some of them in turn")
    parser.add_argument("--rule", action="append", choices=sorted(RULES), help="this generator alone; may be repeated")
    parser.add_argument("--batch", type=int, default=BATCH, help="programs of one rule that are drawn together")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--large", action="store_true", help="sizes that a GPU's kernels take (with --device cuda: every second round)"
    )
    parser.add_argument("--shrinking", type=float, default=40.0, help="seconds to make one finding small")
    parser.add_argument("--report", type=Path, help="write the tally here, as JSON")
    parser.add_argument("--out", type=Path, default=Path("tests/fuzz/found"))
    return parser.parse_args(given)


def tasks(options: argparse.Namespace, until: float) -> Iterator[tuple[Any, ...]]:
    """Batches of every rule in turn, until the time or the programs are over."""
    lowerings = LOWERINGS if options.device == "cpu" else CUDA_LOWERINGS
    if options.lowering is not None:
        lowerings = ((options.lowering,),)
    left, round_ = options.programs, 0
    while left > 0:
        for rule in options.rule or RULES:
            kind = Kind(
                rule=rule, lowerings=lowerings, device=options.device, large=options.large or options.device != "cpu"
            )
            seed = zlib.crc32(f"{options.seed} {rule} {round_}".encode())
            examples = min(options.batch, left)
            left -= examples
            if time.monotonic() > until or examples <= 0:
                return
            yield kind, seed, examples, until, options.shrinking
        round_ += 1


def work(task: tuple[Any, ...]) -> tuple[Tally, Found | None, str]:
    """One batch, in a process of its own."""
    kind, seed, examples, until, shrinking = task
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    tally = Tally()
    found = searching.search(kind, seed=seed, examples=examples, tally=tally, until=until, shrinking=shrinking)
    tally.rules = dict(tally.rules)
    return tally, found, kind.rule


def run(options: argparse.Namespace) -> tuple[Tally, dict[str, Found]]:
    """The tally, and one finding of each sort."""
    start = time.monotonic()
    until = start + options.minutes * 60
    tally, sorts = Tally(), {}
    # CUDA can't be used in a fork of a process that used it; this one did not.
    context = multiprocessing.get_context("fork" if options.device == "cpu" else "spawn")
    with context.Pool(options.jobs, maxtasksperchild=RENEWED) as pool:
        for done, found, rule in _results(pool, tasks(options, until), options.jobs + 1):
            tally.join(done)
            if found is not None and (found.signature, rule) not in sorts:
                sorts[found.signature, rule] = found
                path = writing.write(found, options.out)
                said = f"{found.kind} ({rule}), after {found.seconds:.0f} s of its batch: {found.text[:200]}"
                say(f"{time.monotonic() - start:6.0f} s  {said}\n          {path}")
    return tally, {f"{rule}: {sort}": found for (sort, rule), found in sorts.items()}


def _results(pool: Any, waiting: Iterator[Any], most: int) -> Iterator[Any]:
    """What `work` gives for each task. No more than `most` are out at a time: a pool of its own would ask for all of them at once."""
    out: deque[Any] = deque()
    for task in waiting:
        out.append(pool.apply_async(work, (task,)))
        if len(out) >= most:
            yield out.popleft().get()
    while out:
        yield out.popleft().get()


def say(text: str) -> None:
    """One or several lines, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    start = time.monotonic()
    tally, sorts = run(options)
    seconds = time.monotonic() - start
    total = tally.total["programs"]
    say(tally.table())
    say(
        f"{total} programs in {seconds:.0f} s, {total / max(seconds, 1e-9):.1f} a second; {len(sorts)} sorts of findings"
    )
    if options.report is not None:
        plain = {
            "seconds": seconds,
            "seed": options.seed,
            "jobs": options.jobs,
            "findings": {sort: f.text for sort, f in sorts.items()},
        }
        options.report.write_text(json.dumps({**plain, **tally.plain()}, indent=1) + "\n")
    return 1 if sorts else 0


if __name__ == "__main__":
    sys.exit(main())
