"""One job of the fuzzer: programs of one rule, drawn, judged, and what goes wrong made small. It tells what it does as it goes."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

import torch

from tests.fuzz import searching
from tests.fuzz.crew import Spent, Tell
from tests.fuzz.program import Program
from tests.fuzz.searching import Found, Kind
from tests.fuzz.tally import Tally


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A program is about to be run: where a process is lost, its last one."""

    program: Program


@dataclass(frozen=True, kw_only=True)
class Batch:
    """examples: how many programs. until: when (time.monotonic) to stop. limit: seconds of CPU time for one. gpu_share: of its memory."""

    kind: Kind
    seed: int
    examples: int
    until: float
    shrinking: float = 40.0
    limit: float = searching.LIMIT
    gpu_share: float = 1.0

    def run(self, tell: Tell) -> None:
        """Tells a Begun before each program, the Tally of each one that was judged, and a Found: as it was first, and made small."""
        quiet()
        if self.kind.device != "cpu" and self.gpu_share < 1:
            torch.cuda.set_per_process_memory_fraction(self.gpu_share)

        def begin(program: Program) -> None:
            tell(Begun(program=program))

        def judged(tally: Tally, found: Found | None) -> None:
            tell(tally.sent())
            if found is not None:
                tell(found)

        found, is_over = searching.search(
            self.kind,
            seed=self.seed,
            examples=self.examples,
            until=self.until,
            shrinking=self.shrinking,
            limit=self.limit,
            begin=begin,
            judged_first=judged,
        )
        if found is not None:
            tell(found)
        if is_over:
            raise Spent


def quiet() -> None:
    """No warnings, no logs, one thread: for a process that is there for its result."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
