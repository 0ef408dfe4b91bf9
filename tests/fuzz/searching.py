"""Search for a program that goes wrong, with Hypothesis: drawn from a seed, shrunk while there is time, then cut down line by line."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz import comparing
from tests.fuzz.comparing import Left, OutOfTime, Wrong
from tests.fuzz.grammar.rules import LOWERINGS, programs
from tests.fuzz.program import Program
from tests.fuzz.tally import Tally

#: seconds of CPU time that one program may take: endless compilation is a finding, too
LIMIT = 25.0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is searched: programs of one rule, lowered by these, on a device."""

    rule: str
    lowerings: tuple[tuple[str, ...] | None, ...] = LOWERINGS
    device: str = "cpu"
    large: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """A program that goes wrong: kind and text as in Wrong. seconds: of CPU time until the first one of its sort."""

    program: Program
    kind: str
    text: str
    seconds: float

    @property
    def signature(self) -> str:
        return signature(self.kind, self.text)


def signature(kind: str, text: str) -> str:
    """What failures of one sort have in common: the words of the message without names and numbers."""
    head = re.sub(
        r"\b[a-z_]+\d+\b|\d+(\.\d+)?(e[-+]?\d+)?|\[[^]]*\]|'[^']*'",
        "",
        text.split("|")[0] if kind == "wrong" else text[:260],
    )
    return f"{kind}: {' '.join(head.split())[:120]}"


def judged(program: Program, limit: float = LIMIT) -> comparing.Outcome:
    """`comparing.check` within a limit of CPU time. Raises Left or Wrong."""
    try:
        with _limited(limit):
            return comparing.check(program)
    except OutOfTime:
        raise Wrong("endless", f"not compiled within {limit:g} seconds of CPU time") from None


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def draw(kind: Kind, *, seed: int, examples: int) -> list[Program]:
    """The programs that a search of that seed begins with; nothing is run."""
    drawn: list[Program] = []

    @hypothesis.seed(seed)
    @_settings(examples, Phase.generate)
    @given(programs(kind.rule, kind.lowerings, kind.device, kind.large))
    def collect(program: Program) -> None:
        drawn.append(program)

    collect()
    return drawn


def _settings(examples: int, *phases: Phase) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )


def search(
    kind: Kind, *, seed: int, examples: int, tally: Tally, until: float, shrinking: float = 40.0
) -> Found | None:
    """The first program that goes wrong, made as small as `shrinking` seconds allow; None if there is none of `examples`.

    until: when (time.monotonic) to stop.
    """
    start = time.process_time()
    failing: dict[str, Wrong] = {}
    state: dict[str, Any] = {}

    @hypothesis.seed(seed)
    @_settings(examples, Phase.generate, Phase.shrink)
    @given(programs(kind.rule, kind.lowerings, kind.device, kind.large))
    def holds(program: Program) -> None:
        text = repr(program)
        if text in failing:
            state["last"] = program
            raise failing[text]
        if time.monotonic() > state.get("until", until):
            return
        is_first = "wrong" not in state
        try:
            outcome = judged(program)
        except Left as left:
            if is_first:
                tally.left(kind.rule, str(left))
        except Wrong as wrong:
            if is_first:
                tally.wrong(kind.rule)
                state.update(wrong=wrong, seconds=time.process_time() - start, until=time.monotonic() + shrinking)
            elif signature(wrong.kind, str(wrong)) != signature(state["wrong"].kind, str(state["wrong"])):
                return
            failing[text] = wrong
            state["last"] = program
            raise
        else:
            if is_first:
                tally.compared(kind.rule, outcome)

    with contextlib.suppress(Wrong):
        holds()
    if "wrong" not in state:
        return None
    program, wrong = cut(state["last"], failing[repr(state["last"])], time.monotonic() + shrinking / 2)
    return Found(program=program, kind=wrong.kind, text=str(wrong), seconds=state["seconds"])


def cut(program: Program, wrong: Wrong, until: float) -> tuple[Program, Wrong]:
    """The program without the lines, writes and outputs that make no difference to how it goes wrong."""
    wanted = signature(wrong.kind, str(wrong))
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        for smaller in _smaller(program):
            if time.monotonic() > until:
                break
            try:
                judged(smaller)
            except Left:
                continue
            except Wrong as other:
                if signature(other.kind, str(other)) == wanted:
                    program, wrong, changed = smaller, other, True
                    break
    return program, wrong


def _smaller(program: Program) -> Iterator[Program]:
    for i in reversed(range(len(program.lines))):
        yield dataclasses.replace(program, lines=program.lines[:i] + program.lines[i + 1 :])
    for name, one_less in (("after", program.after), ("outputs", program.outputs)):
        for i in reversed(range(len(one_less))):
            if name == "after" or len(one_less) > 1:
                yield dataclasses.replace(program, **{name: one_less[:i] + one_less[i + 1 :]})
    text = "\n".join((*program.lines, *program.after, *program.outputs))
    for i, own in enumerate(program.inputs):
        if not re.search(rf"\b{own.name}\b", text):
            yield dataclasses.replace(program, inputs=program.inputs[:i] + program.inputs[i + 1 :])
        if own.layout != "{}":
            plain = dataclasses.replace(own, layout="{}")
            yield dataclasses.replace(program, inputs=(*program.inputs[:i], plain, *program.inputs[i + 1 :]))
    if program.others:
        yield dataclasses.replace(program, others=())
    if program.dynamic:
        yield dataclasses.replace(program, dynamic=False)
