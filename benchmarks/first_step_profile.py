"""What our side of a first step spends more than Inductor's, by two profiles of `bench_first_step --profile`.

    python -m benchmarks.first_step_profile FOLDER/llama-train_right-1024-ours.prof FOLDER/llama-train_right-1024-inductor.prof

Prints the time in functions themselves by library, and the functions with all that they call, those with the largest difference first.
Under a profiler all takes longer, Python's functions most. Only the main thread is in it.
"""

from __future__ import annotations

import collections
import pstats
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import arg, command

#: (file, line, name) -> (seconds in itself, seconds with all that it calls)
Seconds = Mapping[tuple[str, int, str], tuple[float, float]]

_LIBRARY = re.compile(
    r"(?:site|dist)-packages/(torch/_?\w+|\w+)|(attn_compiler)/|lib/python[\d.]+/(?!(?:site|dist)-packages)(\w+)"
)


def seconds_of(path: Path) -> Seconds:
    stats: Any = pstats.Stats(str(path))
    return {function: (own, whole) for function, (_, _, own, whole, _) in stats.stats.items()}


def library(file: str, name: str) -> str:
    """Whose a function is. Of a built-in one, its name."""
    found = _LIBRARY.search(file)
    if found is None:
        return name if file == "~" else "generated code and others"
    return next(filter(None, found.groups()))


def by_library(seconds: Seconds) -> Mapping[str, float]:
    sums: collections.Counter[str] = collections.Counter()
    for (file, _, name), (own, _) in seconds.items():
        sums[library(file, name)] += own  # type: ignore[assignment]
    return sums


def compared(ours: Mapping[Any, float], theirs: Mapping[Any, float], most: int) -> list[tuple[Any, float, float]]:
    """Names with the seconds of both, the largest difference first."""
    rows = [(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in {*ours, *theirs}]
    return sorted(rows, key=lambda row: row[2] - row[1])[:most]


def said(ours: Seconds, theirs: Seconds, most: int) -> list[str]:
    """For people."""
    own = compared(by_library(ours), by_library(theirs), most)
    wholes = [{name: whole for name, (_, whole) in side.items()} for side in (ours, theirs)]
    whole = compared(wholes[0], wholes[1], 2 * most)
    return [
        f"in all: ours {sum(x for x, _ in ours.values()):.2f} s, Inductor's {sum(x for x, _ in theirs.values()):.2f} s",
        *(f"{mine:7.3f} {other:7.3f} {mine - other:+7.3f}  {name}" for name, mine, other in own),
        "with what they call:",
        *(
            f"{mine:7.3f} {other:7.3f} {mine - other:+7.3f}  {file[-60:]}:{line} {name}"
            for (file, line, name), mine, other in whole
        ),
    ]


@command(__doc__, arg("ours", type=Path), arg("inductors", type=Path), arg("--most", type=int, default=25))
def main(given: Namespace) -> None:
    print("\n".join(said(seconds_of(given.ours), seconds_of(given.inductors), given.most)))


if __name__ == "__main__":
    sys.exit(main())
