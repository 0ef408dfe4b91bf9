"""What the fuzzer finds of faults that were planted on purpose: python -m tests.fuzz.recall --minutes 60 --processes 2

The programs are drawn once, every rule in turn, without knowing of any fault, and run on the code as it is; those that it gets right are
what a fault has to be found by. A fault is put into a process of its own, where our package is not imported yet or, if the fault is in one
function, where that function is exchanged. Programs that do not reach the changed statement are passed over: they give what they gave.
Those of the rules that speak of what the fault breaks have their turn first. --csv takes a row for each fault as soon as it is known; what
has a row of the same code there is not tried again.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Before torch is imported: this process and its forks use no GPU.
    import os

    from tests.fuzz import environment

    os.environ.update(environment.variables("cpu"))

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import corpus, crew, preload, recall_rows, searching
from tests.fuzz.batch import quiet
from tests.fuzz.comparing import Wrong
from tests.fuzz.corpus import Known
from tests.fuzz.crew import Ended, Limits, Lost, Tell
from tests.fuzz.discards import Left
from tests.fuzz.grammar.rules import RULES
from tests.fuzz.planted import FAULTS, KERNELS, Fault, plant, swap
from tests.fuzz.recall_rows import Row
from tests.fuzz.reporting import say

#: the share of the faults that has to be found
WANTED = 0.95

#: what a fault breaks, where that has not the name of a rule -> the rules that speak of it
_SPEAK_OF = {
    "masks": ("mask kinds", "masks made", "mask tensors", "several masks", "masks partly written", "masks written"),
    "index expressions": ("mask kinds", "score kinds", "integers", "mask tensors", "symbolic"),
    "mask kinds": ("mask kinds", "intervals", "tiles"),
    "masks written": ("masks written", "masks partly written", "weights masked"),
    "several masks": ("several masks", "weights masked"),
    "triton": ("intervals", "tiles", "mask kinds", "score kinds", "boundaries"),
    "reference": ("boundaries", "score steps", "sinks", "gradients", "contractions"),
    "mask kinds (triton)": ("intervals", "tiles", "mask kinds", "mask tensors"),
    "score kinds (triton)": ("tiles", "score kinds"),
    "operands": ("strides", "views", "arrange", "score steps", "boundaries"),
    "limits": ("boundaries", "mask kinds", "score kinds"),
}

#: the programs, in order: what a fork has without being sent it
_order: list[Known] = []


@dataclass(frozen=True, kw_only=True)
class Tried:
    """found: by which kind of failure, None so far. programs: how many were run. place: in the order, of the last one. seconds: CPU."""

    found: str | None = None
    programs: int = 0
    place: int = -1
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Attempt:
    """A job: run programs on the code with the fault until one goes wrong or the CPU time is over. In a fork of its own."""

    fault: Fault
    places: tuple[int, ...]
    seconds: float

    def run(self, tell: Tell) -> None:
        quiet()
        if "attn_compiler" not in sys.modules:
            plant(self.fault)
        elif not swap(self.fault):
            raise RuntimeError(f"{self.fault.name} can't be put into a package that is imported")
        start, tried = time.process_time(), Tried()
        for count, place in enumerate(self.places, 1):
            tried = Tried(programs=count, place=place, seconds=time.process_time() - start)
            if tried.seconds > self.seconds:
                break
            tell(tried)
            try:
                searching.judged(_order[place].program)
            except Left:
                continue
            except Wrong as wrong:
                spent = time.process_time() - start
                tried = Tried(found=wrong.kind, programs=count, place=place, seconds=spent, text=str(wrong)[:200])
                break
        tell(tried)


def concerned(fault: Fault, order: Sequence[Known]) -> tuple[int, ...]:
    """The places of the programs that can come out otherwise; those that speak of the fault first."""
    place = fault.place()
    if KERNELS in fault.file:
        found = [i for i, known in enumerate(order) if "triton" in known.lowered]
    elif place is None:
        found = list(range(len(order)))
    else:
        found = [i for i, known in enumerate(order) if (fault.file, place) in known.ran]
    first = _SPEAK_OF.get(fault.rule, (fault.rule,))
    return tuple(sorted(found, key=lambda i: order[i].program.rule not in first))


def tried(attempts: Sequence[Attempt], limits: Limits, until: float) -> Iterator[tuple[Attempt, Tried]]:
    """Each attempt and what came of it, until the time is over. A process that is lost with a fault has found it."""
    waiting = (attempt for attempt in attempts if time.monotonic() < until)
    last: dict[Attempt, Tried] = {}
    for attempt, told in crew.events(waiting, limits):
        if isinstance(told, Tried):
            last[attempt] = told
        elif isinstance(told, Lost):
            so_far = last.get(attempt, Tried())
            yield attempt, Tried(found=told.kind, programs=so_far.programs, place=so_far.place, text=told.text[:200])
        elif isinstance(told, Ended):
            text = told.text
            yield attempt, last[attempt] if text is None else Tried(found="does not run", text=text[:200])


def _is_cold(fault: Fault) -> bool:
    """Whether it has to be there when our package is imported."""
    return fault.place() is None or KERNELS in fault.file


def _import_ours(order: Sequence[Known]) -> None:
    """Our package and what it imports late, so that no fork has to."""
    quiet()
    allowed = [known for known in order if preload.may_train() or not any(i.grad for i in known.program.inputs)]
    lowerings = {name: known for known in reversed(allowed) for name in known.lowered}
    for known in [*allowed[:3], *lowerings.values()]:
        searching.judged(known.program)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.recall", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="for all faults; drawing programs is not counted")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=12, help="how often every rule has its turn")
    parser.add_argument("--fault", action="append", help="part of the name of a fault; may be repeated")
    parser.add_argument(
        "--rule", action="append", choices=sorted(RULES), help="programs of these alone; may be repeated"
    )
    parser.add_argument("--seconds", type=float, help="of CPU time for one fault; else a fair share of the minutes")
    parser.add_argument("--silence", type=float, default=240.0, help="seconds after which a program hangs")
    parser.add_argument("--programs", type=Path, help="keep the programs here, and take them from here")
    parser.add_argument("--csv", type=Path, help="a row for each fault; those of the same code stay")
    parser.add_argument("--logs", type=Path, help="a folder for what the processes print")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    gone = recall_rows.gone(FAULTS)
    if gone:
        say("\n".join(["these faults do not apply:", *gone]))
        return 2
    order = _drawn(options)
    faults = [f for f in FAULTS if options.fault is None or any(part in f.name for part in options.fault)]
    about = recall_rows.about(seed=options.seed, rounds=options.rounds, programs=len(order), rules=options.rule or ())
    rows = recall_rows.read(options.csv, about)
    left = [f for f in faults if f.name not in rows]
    say(f"{len(order)} programs; {len(faults)} faults, of which {len(left)} are to be tried")
    start = time.monotonic()

    def known(fault: Fault, result: Tried) -> None:
        rows[fault.name] = _row(fault, result, order)
        recall_rows.write(options.csv, about, rows)
        say(f"{time.monotonic() - start:6.0f} s  {rows[fault.name].said()}")

    _try(left, order, options, start + options.minutes * 60, known)
    mine = [rows[f.name] for f in faults if f.name in rows]
    say(recall_rows.summary(mine, len(faults)))
    return 0 if sum(bool(row.found) for row in mine) >= WANTED * len(faults) else 1


def _try(
    faults: Sequence[Fault],
    order: list[Known],
    options: argparse.Namespace,
    until: float,
    known: Callable[[Fault, Tried], None],
) -> None:
    """Those that have to come before the package first: from then on it is imported."""
    _order[:] = order
    preload.warm()
    share = options.seconds or options.minutes * 60 * options.processes / max(len(faults), 1)
    limits = _limits(options, method="fork", renewed=1)
    for are_cold in (True, False):
        attempts = [Attempt(f, concerned(f, order), share) for f in faults if _is_cold(f) is are_cold]
        if attempts and not are_cold:
            _import_ours(order)
        for attempt, result in tried(attempts, limits, until):
            known(attempt.fault, result)


def _limits(options: argparse.Namespace, *, method: str, renewed: int) -> Limits:
    memory = int(min(0.8 * crew.total_memory() / options.processes, 8 * 2**30))
    return Limits(
        processes=options.processes,
        method=method,
        silence=options.silence,
        memory=memory,
        renewed=renewed,
        logs=options.logs,
    )


def _row(fault: Fault, result: Tried, order: Sequence[Known]) -> Row:
    by = order[result.place].program.rule if result.found and result.place >= 0 else ""
    before = sum(known.seconds for known in order[: result.place + 1])
    return Row(
        fault=fault.name,
        file=fault.file,
        within=fault.within or "",
        rule=fault.rule,
        found=result.found or "",
        by=by,
        programs=result.programs,
        place=result.place,
        seconds=round(result.seconds, 1),
        minutes_of_two_cores=round(before / 120, 2),
    )


def _drawn(options: argparse.Namespace) -> list[Known]:
    key = f"{recall_rows.digest()} {options.seed} {options.rounds} {options.rule}"
    order = corpus.kept(options.programs, key)
    if order is None:
        limits = _limits(options, method="forkserver", renewed=40)
        rules = tuple(options.rule or RULES)
        order = corpus.programs(seed=options.seed, rounds=options.rounds, limits=limits, rules=rules)
        corpus.keep(options.programs, key, order)
    return order


if __name__ == "__main__":
    sys.exit(main())
