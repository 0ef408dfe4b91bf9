"""The table of planted faults: a CSV file with a row for each, under a line that says of which code, machine and programs it is."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.fuzz.planted.fault import PACKAGE, DoesNotApply, Fault

FUZZER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Row:
    """rule: what is broken. found: by which kind of failure, empty for none; by: the rule of the program that found it.

    programs: that were run with the fault; place: of the last one in the order. seconds: of CPU time with the fault.
    minutes_of_two_cores: that the fuzzer takes on the code as it is until it comes to that place.
    """

    fault: str
    file: str
    within: str
    rule: str
    found: str
    by: str
    programs: int
    place: int
    seconds: float
    minutes_of_two_cores: float

    def said(self) -> str:
        result = f"found ({self.found}, {self.by})" if self.found else "NOT FOUND"
        return f"{self.fault}: {result} after {self.programs} programs, {self.seconds:.1f} s"


def digest() -> str:
    """A number of the code that is tested and of the fuzzer; what the table says holds for these alone."""
    found = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.csv"), *FUZZER.rglob("*.py")]):
        if not path.name.startswith("test_"):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def about(*, seed: int, rounds: int, programs: int, rules: Iterable[str] = ()) -> str:
    """The first line of the table. rules: that the programs are of, if not of all."""
    command = ["git", "-C", str(PACKAGE), "rev-parse", "--short=10", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return (
        f"# code: {digest()}; commit: {commit}; torch {torch.__version__}; Python {platform.python_version()}; "
        f"seed {seed}; rounds {rounds}; programs {programs}" + "".join(f"; rule {rule}" for rule in rules)
    )


def gone(faults: Iterable[Fault]) -> list[str]:
    """What is to be said of faults whose code is not there any more."""
    said = []
    for fault in faults:
        try:
            fault.source()
        except DoesNotApply as error:
            said.append(str(error))
    return said


def read(path: Path | None, head: str) -> dict[str, Row]:
    """The rows of the same code, by fault; none of another one's."""
    if path is None or not path.exists():
        return {}
    first, *lines = path.read_text().splitlines()
    if _key(first) != _key(head):
        return {}
    types = {f.name: {"str": str, "int": int, "float": float}[str(f.type)] for f in dataclasses.fields(Row)}
    rows = [Row(**{name: types[name](text) for name, text in row.items()}) for row in csv.DictReader(lines)]
    return {row.fault: row for row in rows}


def write(path: Path | None, head: str, rows: Mapping[str, Row]) -> None:
    if path is None:
        return
    with path.open("w", newline="") as file:
        file.write(f"{head}\n")
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(rows[name]) for name in sorted(rows))


def summary(rows: Sequence[Row], faults: int) -> str:
    found = [row for row in rows if row.found]
    late = [row for row in found if row.minutes_of_two_cores > 60]
    lines = [
        f"recall: {len(found)} of {faults} faults, {100 * len(found) / max(faults, 1):.1f}%; {faults - len(rows)} not tried"
    ]
    lines += [f"  after more than an hour of two cores: {row.fault}" for row in late]
    lines += [
        f"  not found: {row.fault} ({row.file}, {row.within}); {row.programs} programs" for row in rows if not row.found
    ]
    return "\n".join(lines)


def _key(head: str) -> list[str]:
    """Without the commit, which changes with the table itself."""
    return [part for part in head.split("; ") if not part.startswith("commit")]
