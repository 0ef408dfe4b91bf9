"""What a run of the fuzzer says: findings as they come, one of each sort, a line each minute, and the tally."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz import writing
from tests.fuzz.searching import Found
from tests.fuzz.tally import Tally

#: lines of a finding that are printed; the rest is in its file
LINES = 12
#: findings of which each is printed
PRINTED = 20
#: seconds between two lines about how far it is
EVERY = 60.0


def say(text: str) -> None:
    """One or several lines, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(kw_only=True)
class Log:
    """sorts: a finding of each sort, by rule. failures: of the fuzzer itself. about: the run, for the report."""

    out: Path
    report: Path | None = None
    about: dict[str, Any] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    sorts: dict[tuple[str, str], Found] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def found(self, found: Found) -> None:
        sort = (found.program.rule, found.signature)
        if sort in self.sorts:
            return
        self.sorts[sort] = found
        path = writing.write(found, self.out)
        path.with_suffix(".txt").write_text(f"{found.kind}\n{found.text}\n{found.program!r}\n")
        if len(self.sorts) <= PRINTED:
            head = [line[:200] for line in found.text.splitlines()[:LINES]]
            say("\n          ".join([f"{self.seconds:6.0f} s  {found.kind} ({found.program.rule}): {path}", *head]))

    def failed(self, text: str) -> None:
        """The fuzzer itself has a fault."""
        self.failures.append(text)
        if len(self.failures) <= PRINTED:
            say(f"{self.seconds:6.0f} s  the fuzzer failed: {text[:1000]}")

    def go_on(self) -> None:
        """A line and the report, from time to time."""
        if time.monotonic() - self.said < EVERY:
            return
        self.said = time.monotonic()
        total = self.tally.total
        parts = [f"{total[name]} {name}" for name in ("programs", "compared", "matched", "wrong", "discarded")]
        say(f"{self.seconds:6.0f} s  {', '.join(parts)}")
        self._write()

    def end(self) -> None:
        """The tally, and what of it matters most."""
        total = self.tally.total["programs"]
        say(self.tally.table())
        say(
            f"{total} programs in {self.seconds:.0f} s, {total / max(self.seconds, 1e-9):.1f} a second; "
            f"{len(self.sorts)} sorts of findings, {100 * self.tally.discarded:.1f}% discarded"
        )
        self._write()

    def _write(self) -> None:
        if self.report is None:
            return
        findings = {f"{rule}: {sort}": found.text[:600] for (rule, sort), found in self.sorts.items()}
        plain = {**self.about, "seconds": round(self.seconds), "findings": findings, "failures": self.failures}
        self.report.write_text(json.dumps({**plain, **self.tally.plain()}, indent=1) + "\n")
