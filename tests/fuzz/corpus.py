"""The programs that planted faults are looked for with: drawn rule by rule, those that the code as it is gets right, and what they run."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.fuzz import searching
from tests.fuzz.comparing import Left, Wrong
from tests.fuzz.grammar.rules import RULES
from tests.fuzz.planted import noting
from tests.fuzz.program import Program
from tests.fuzz.searching import Kind

#: programs of one rule that stand together in the order
TOGETHER = 3


@dataclass(frozen=True, kw_only=True)
class Known:
    """A program that the code as it is gets right. ran: (file, first line) of our functions that it called."""

    program: Program
    ran: frozenset[tuple[str, int]]
    lowered: frozenset[str]
    seconds: float


def schedule(seed: int, rounds: int) -> Iterator[tuple[Kind, int]]:
    """(what to draw, seed), rule by rule."""
    for round_ in range(rounds):
        for rule in RULES:
            yield Kind(rule=rule), zlib.crc32(f"{seed} {rule} {round_}".encode())


def _known(task: tuple[Kind, int]) -> list[Known]:
    kind, seed = task
    quiet()
    noting.install()
    # The first program that Hypothesis draws is the simplest one, whatever the seed.
    drawn = searching.draw(kind, seed=seed, examples=TOGETHER + 1)[1:]
    return [known for program in drawn if (known := _observed(program)) is not None]


def _observed(program: Program) -> Known | None:
    noting.ran.clear()
    start = time.process_time()
    try:
        outcome = searching.judged(program)
    except (Left, Wrong):
        return None
    seconds = time.process_time() - start
    return Known(program=program, ran=frozenset(noting.ran), lowered=frozenset(outcome.lowered), seconds=seconds)


def programs(*, seed: int, rounds: int, jobs: int, keep: Path | None) -> list[Known]:
    """All that the code as it is gets right, in order. keep: where they are written as they come."""
    order: list[Known] = []
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=40) as pool:
        for number, some in enumerate(pool.imap(_known, schedule(seed, rounds), chunksize=1)):
            order += some
            if keep is not None and number % len(RULES) == len(RULES) - 1:
                keep.write_bytes(pickle.dumps(order))
    return order


def quiet() -> None:
    """No warnings, no logs, one thread: for a process that is there for its result."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
