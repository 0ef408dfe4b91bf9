"""What became of the programs: by rule, by lowering, by what their masks were proved to be."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.comparing import Outcome
from tests.fuzz.program import Program


@dataclass(kw_only=True)
class Tally:
    """rules: by rule, how many were compared, left out, wrong, had sites lowered or left alone, or were compared loosely.

    lowered: sites by lowering. ran: programs that ran a lowering. proved: masks and scores. reasons: why programs were discarded.
    seen: a number of each program that was drawn, to count those that differ.
    """

    rules: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    lowered: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    proved: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)

    def drawn(self, program: Program) -> None:
        self.seen.add(zlib.crc32(repr(program).encode()) << 32 | zlib.adler32(repr(program).encode()))

    def compared(self, rule: str, outcome: Outcome) -> None:
        self.rules[rule].update(
            programs=1,
            compared=1,
            matched=int(bool(outcome.lowered)),
            **{"left alone": int(not outcome.lowered)},
            sites=sum(outcome.lowered.values()),
            untouched=outcome.untouched,
            missed=outcome.missed,
            loosely=int(outcome.loosely > 0),
            noisy=int(outcome.noisy > 0),
        )
        self.lowered.update(outcome.lowered)
        self.ran.update(outcome.lowered.keys())
        self.proved.update(outcome.proved)

    def left(self, rule: str, reason: str) -> None:
        self.rules[rule].update(programs=1, discarded=1)
        self.reasons[reason] += 1

    def wrong(self, rule: str) -> None:
        self.rules[rule].update(programs=1, wrong=1)

    def join(self, other: Tally) -> None:
        for rule, counts in other.rules.items():
            self.rules[rule].update(counts)
        self.lowered.update(other.lowered)
        self.ran.update(other.ran)
        self.proved.update(other.proved)
        self.reasons.update(other.reasons)
        self.seen |= other.seen

    def sent(self) -> Tally:
        """The same, as a process can send it."""
        return dataclasses.replace(self, rules=dict(self.rules))

    @property
    def total(self) -> Counter[str]:
        return sum(self.rules.values(), Counter())

    @property
    def discarded(self) -> float:
        """The share of the programs that say nothing."""
        return self.total["discarded"] / max(self.total["programs"], 1)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "rules": {rule: dict(counts) for rule, counts in self.rules.items()},
            "total": dict(self.total),
            "different": len(self.seen),
            "lowered": dict(self.lowered),
            "programs by lowering": dict(self.ran),
            "proved": dict(self.proved),
            "discarded because": dict(self.reasons.most_common()),
        }

    def table(self) -> str:
        columns = (
            "programs",
            "compared",
            "matched",
            "left alone",
            "wrong",
            "discarded",
            "sites",
            "untouched",
            "missed",
            "loosely",
            "noisy",
        )
        rows = [("rule", *columns)]
        for rule, counts in [*self.rules.items(), ("all", self.total)]:
            rows.append((rule, *(str(counts[name]) for name in columns)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines += ["", f"{len(self.seen)} programs differ from each other"]
        lines += ["programs by lowering: " + ", ".join(f"{name} {n}" for name, n in self.ran.most_common())]
        lines += ["sites by lowering: " + ", ".join(f"{name} {n}" for name, n in self.lowered.most_common())]
        lines += ["proved: " + ", ".join(f"{name} {n}" for name, n in self.proved.most_common())]
        lines += ["discarded:", *(f"{n:6}  {reason}" for reason, n in self.reasons.most_common())]
        return "\n".join(lines)
