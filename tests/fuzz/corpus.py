"""The programs that planted faults are looked for with: drawn rule by rule, those that the code as it is gets right, and what they run."""

from __future__ import annotations

import itertools
import pickle
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import crew, searching
from tests.fuzz.batch import Begun, quiet
from tests.fuzz.comparing import Wrong
from tests.fuzz.crew import Ended, Limits, Lost, Tell
from tests.fuzz.discards import Left
from tests.fuzz.grammar.rules import RULES
from tests.fuzz.planted import noting
from tests.fuzz.program import Program
from tests.fuzz.reporting import say
from tests.fuzz.searching import Kind

#: programs of one rule that stand together in the order
TOGETHER = 3


@dataclass(frozen=True, kw_only=True)
class Known:
    """A program that the code as it is gets right. ran: (file, line) of our statements that it reached. seconds: of CPU time."""

    program: Program
    ran: frozenset[tuple[str, int]]
    lowered: frozenset[str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Mistaken:
    """A program that the code as it is gets wrong: no fault can be told by it."""

    program: Program
    text: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A rule's turn: a job that tells what it knows. number: in the order. seconds: of CPU time for one program."""

    number: int
    kind: Kind
    seed: int
    seconds: float = searching.LIMIT

    def run(self, tell: Tell) -> None:
        quiet()
        noting.install()
        # The first program that Hypothesis draws is the simplest one, whatever the seed.
        for program in searching.draw(self.kind, seed=self.seed, examples=TOGETHER + 1)[1:]:
            tell(Begun(program=program))
            observed = _observed(program, self.seconds)
            if observed is not None:
                tell(observed)


def turns(seed: int, rounds: int, rules: Iterable[str] = tuple(RULES)) -> Iterator[Turn]:
    """Every rule in turn."""
    for number, (round_, rule) in enumerate(itertools.product(range(rounds), rules)):
        yield Turn(number=number, kind=Kind(rule=rule), seed=zlib.crc32(f"{seed} {rule} {round_}".encode()))


def _observed(program: Program, seconds: float) -> Known | Mistaken | None:
    noting.ran.clear()
    start = time.process_time()
    try:
        outcome = searching.judged(program, seconds)
    except Left:
        return None
    except Wrong as wrong:
        return Mistaken(program=program, text=str(wrong))
    return Known(
        program=program,
        ran=frozenset(noting.ran),
        lowered=frozenset(outcome.lowered),
        seconds=time.process_time() - start,
    )


def programs(*, seed: int, rounds: int, limits: Limits, rules: Iterable[str] = tuple(RULES)) -> list[Known]:
    """All that the code as it is gets right, in order. What it gets wrong is told."""
    told: dict[int, list[Known]] = {}
    for turn, said in crew.events(turns(seed, rounds, rules), limits):
        if isinstance(said, Known):
            told.setdefault(turn.number, []).append(said)
        elif isinstance(said, Mistaken):
            say(f"wrong without any fault: {said.text}{said.program}")
        elif isinstance(said, Lost) or (isinstance(said, Ended) and said.text is not None):
            raise RuntimeError(f"drawing programs of {turn.kind.rule}, seed {turn.seed}: {said.text}")
    return [known for number in sorted(told) for known in told[number]]


def kept(path: Path | None, key: str) -> list[Known] | None:
    """The programs that are in the file, if they were drawn of the same code in the same way."""
    if path is None or not path.exists():
        return None
    found, order = pickle.loads(path.read_bytes())
    return order if found == key else None


def keep(path: Path | None, key: str, order: list[Known]) -> None:
    if path is not None:
        path.write_bytes(pickle.dumps((key, order)))
