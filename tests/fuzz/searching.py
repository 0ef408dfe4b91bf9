"""Search for a program that goes wrong, with Hypothesis: drawn from a seed, shrunk while there is time, then cut down line by line."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz import comparing
from tests.fuzz.comparing import OutOfTime, Wrong
from tests.fuzz.discards import Left
from tests.fuzz.grammar.rules import LOWERINGS, programs
from tests.fuzz.program import Program
from tests.fuzz.tally import Tally

#: seconds of CPU time that one program may take: endless compilation is a finding, too
LIMIT = 25.0

Begin = Callable[[Program], None]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is searched: programs of one rule, lowered by these, on a device. inner: what compiles the rest, without it one of several."""

    rule: str
    lowerings: tuple[tuple[str, ...] | None, ...] = LOWERINGS
    device: str = "cpu"
    large: bool = False
    inner: str | None = None


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


JudgedFirst = Callable[[Tally, Found | None], None]


def signature(kind: str, text: str) -> str:
    """What failures of one sort have in common: the words of the message without names and numbers."""
    head = re.sub(
        r"\b[a-z_]+\d+\b|\d+(\.\d+)?(e[-+]?\d+)?|\[[^]]*\]|'[^']*'",
        "",
        text.split("|")[0] if kind == "wrong" else text[:260],
    )
    return f"{kind}: {' '.join(head.split())[:120]}"


def is_of_cuda(text: str) -> bool:
    """Whether a failure is one after which CUDA does nothing more in this process."""
    return "CUDA error" in text or "CUDA driver error" in text


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
    @given(_programs(kind))
    def collect(program: Program) -> None:
        drawn.append(program)

    collect()
    return drawn


def _programs(kind: Kind) -> Any:
    return programs(kind.rule, kind.lowerings, kind.device, kind.large, kind.inner)


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


@dataclass(kw_only=True)
class _Search:
    """What is known so far. wrong: the first thing that went wrong; from then on only what goes wrong alike is looked at.

    is_over: this process can run no other program.
    """

    kind: Kind
    until: float
    shrinking: float
    limit: float
    begin: Begin
    judged_first: JudgedFirst
    start: float = field(default_factory=time.process_time)
    failing: dict[str, Wrong] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    wrong: Wrong | None = None
    last: Program | None = None
    is_over: bool = False
    seconds: float = 0.0
    drawn: int = 0

    def hold(self, program: Program) -> None:
        """Raises Wrong for a program that goes wrong like the first one."""
        self.drawn += 1
        text = repr(program)
        known = self.failing.get(text)
        if known is not None:
            self.last = program
            raise known
        # Hypothesis draws some again, and what it gave before it gives again.
        if text in self.seen:
            return
        # Hypothesis draws the simplest program first, whatever the seed: it would be most of what is drawn.
        if (
            self.drawn == 1
            or self.is_over
            or time.monotonic() > self.until
            or (self.wrong is not None and self.is_small)
        ):
            return
        self.seen.add(text)
        wrong = self._judge(program) if self.wrong is None else self._judge_alike(program)
        if wrong is not None:
            self.failing[text], self.last = wrong, program
            raise wrong

    def _judge(self, program: Program) -> Wrong | None:
        tally = Tally()
        tally.drawn(program)
        self.begin(program)
        try:
            tally.compared(self.kind.rule, judged(program, self.limit))
        except Left as left:
            tally.left(self.kind.rule, str(left))
            self.is_over = left.is_last
        except Wrong as wrong:
            tally.wrong(self.kind.rule)
            self.wrong, self.last = wrong, program
            self.seconds, self.until = time.process_time() - self.start, time.monotonic() + self.shrinking
            self.judged_first(tally, self.found(program, wrong))
            return wrong
        self.judged_first(tally, None)
        return None

    def _judge_alike(self, program: Program) -> Wrong | None:
        assert self.wrong is not None
        self.begin(program)
        try:
            judged(program, self.limit)
        except Left:
            return None
        except Wrong as wrong:
            return wrong if _are_alike(wrong, self.wrong) else None
        return None

    @property
    def is_small(self) -> bool:
        """Whether nothing is to be made smaller: nobody asks for it, or this process can run no other program."""
        return self.shrinking <= 0 or (self.wrong is not None and is_of_cuda(str(self.wrong)))

    def found(self, program: Program, wrong: Wrong) -> Found:
        return Found(program=program, kind=wrong.kind, text=str(wrong), seconds=self.seconds)


def search(
    kind: Kind,
    *,
    seed: int,
    examples: int,
    until: float,
    shrinking: float = 40.0,
    limit: float = LIMIT,
    begin: Begin = lambda _: None,
    judged_first: JudgedFirst = lambda *_: None,
) -> tuple[Found | None, bool]:
    """(the first program that goes wrong of `examples`, made as small as `shrinking` seconds allow; whether this process is done for).

    until: when (time.monotonic) to stop. limit: seconds of CPU time for one program. begin: is told each program before it is run.
    judged_first: is told the tally of each program that was judged before something went wrong, and that first finding.
    """
    state = _Search(kind=kind, until=until, shrinking=shrinking, limit=limit, begin=begin, judged_first=judged_first)

    @hypothesis.seed(seed)
    @_settings(examples + 1, Phase.generate, *([Phase.shrink] if shrinking > 0 else []))
    @given(_programs(kind))
    def holds(program: Program) -> None:
        state.hold(program)

    with contextlib.suppress(Wrong):
        holds()
    if state.last is None:
        return None, state.is_over
    wrong = state.failing[repr(state.last)]
    if state.is_small:
        return state.found(state.last, wrong), is_of_cuda(str(wrong))
    return state.found(*cut(state.last, wrong, time.monotonic() + shrinking / 2, limit=limit, begin=begin)), False


def cut(
    program: Program, wrong: Wrong, until: float, *, limit: float = LIMIT, begin: Begin = lambda _: None
) -> tuple[Program, Wrong]:
    """The program without the lines, writes and outputs that make no difference to how it goes wrong."""
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        for smaller in _smaller(program):
            if time.monotonic() > until:
                break
            begin(smaller)
            try:
                judged(smaller, limit)
            except Left:
                continue
            except Wrong as other:
                if _are_alike(other, wrong):
                    program, wrong, changed = smaller, other, True
                    break
    return program, wrong


def _are_alike(a: Wrong, b: Wrong) -> bool:
    return signature(a.kind, str(a)) == signature(b.kind, str(b))


def _smaller(program: Program) -> Iterator[Program]:
    for i in reversed(range(len(program.lines))):
        # Without its probe a program of rows without keys is no discard any more.
        if program.lines[i].lstrip().startswith("# probe:"):
            continue
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
    for name in ("third", "others"):
        if getattr(program, name):
            yield dataclasses.replace(program, **{name: ()})  # type: ignore[arg-type]
    if program.dynamic:
        yield dataclasses.replace(program, dynamic=False)
