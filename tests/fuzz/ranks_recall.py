"""What random models on two processes find of faults that were planted: python -m tests.fuzz.ranks_recall --programs 200 --csv FILE

The programs are those of `tests/fuzz/ranks.py`, which the code as it is runs right or refuses. A fault is put into both processes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
from pathlib import Path

from tests.distributed import processes
from tests.fuzz import ranks, recall_rows
from tests.fuzz.planted import Fault, sharing, swap
from tests.fuzz.recall_rows import Row
from tests.fuzz.reporting import say

#: programs that are run by one pair of processes
_BATCH = 25


def outcomes(fault: Fault, programs: list[ranks.Program]) -> list[str]:
    """As ranks.outcomes, with the fault in this process. What a program raises is wrong, too. Raises RuntimeError where it is in no
    function."""
    importlib.import_module(fault.module)
    # What was imported before a fork is looked for, too.
    gc.unfreeze()
    if not swap(fault):
        raise RuntimeError(f"{fault.name} can't be put into a package that is imported")
    found = []
    for program in programs:
        try:
            found += ranks.outcomes([program])
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            found.append(f"wrong: {type(error).__name__}")
    return found


def tried(fault: Fault, programs: list[ranks.Program]) -> Row:
    """The row of a fault: found by the first program that is wrong with it."""
    start, found, place = time.monotonic(), "", len(programs) - 1
    for begin in range(0, len(programs), _BATCH):
        some = programs[begin : begin + _BATCH]
        by_rank = processes.run(outcomes, fault, some)
        wrong = [i for i in range(len(some)) if ranks.kind_of([said[i] for said in by_rank]) == "wrong"]
        if wrong:
            found, place = "wrong", begin + wrong[0]
            break
    return Row(
        fault=fault.name,
        file=fault.file,
        within=fault.within or "",
        rule=fault.rule,
        found=found,
        by="ranks" if found else "",
        programs=place + 1,
        place=place,
        seconds=round(time.monotonic() - start, 1),
        minutes_of_two_cores=round((time.monotonic() - start) / 60, 2),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.ranks_recall", description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="a row for each fault; those of the same code stay")
    options = parser.parse_args()
    about = recall_rows.about(seed=options.seed, rounds=1, programs=options.programs, rules=("ranks",))
    rows = recall_rows.read(options.csv, about)
    programs = ranks.drawn(options.seed, options.programs)
    for fault in sharing.ALL:
        if fault.name not in rows:
            rows[fault.name] = tried(fault, programs)
            recall_rows.write(options.csv, about, rows)
            say(rows[fault.name].said())
    say(recall_rows.summary(list(rows.values()), len(sharing.ALL)))
    return 0 if all(row.found for row in rows.values()) else 1


if __name__ == "__main__":
    # Processes find what they run by its module's name.
    from tests.fuzz import ranks_recall

    sys.exit(ranks_recall.main())
