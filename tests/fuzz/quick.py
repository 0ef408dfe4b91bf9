"""One planted fault that is found at once, as the test of planted faults does it: planted, found, made small, written, and read again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import batch, preload, searching, writing
from tests.fuzz.crew import Tell
from tests.fuzz.planted import FAULTS, plant


@dataclass(frozen=True, kw_only=True)
class Find:
    """A job; tells {"same", "lines", "kind"} of the program that the written test has."""

    name: str
    rule: str
    folder: str

    def run(self, tell: Tell) -> None:
        batch.quiet()
        preload.warm()
        plant(next(f for f in FAULTS if f.name == self.name))
        kind = searching.Kind(rule=self.rule, lowerings=(("reference",),))
        found, _ = searching.search(kind, seed=1, examples=40, until=1e12, shrinking=10.0)
        if found is None:
            return
        path = writing.write(found, Path(self.folder))
        scope: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        lines = [line for line in found.program.lines if not line.startswith("#")]
        tell({"same": scope["PROGRAM"] == found.program, "lines": len(lines), "kind": found.kind})
