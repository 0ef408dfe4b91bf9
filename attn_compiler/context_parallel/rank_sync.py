"""Agreement of the ranks of a group on their next step, through the store of the process group, where no collective can hang.

While they compile they compare their findings, and before each call of compiled code they check that it is the same code. Each rank counts
its messages. The n-th message of one rank is compared with the n-th of the others; calls are compared between two messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from attn_compiler.reasons.errors import ContextParallelUnsupported, described
from attn_compiler.torch_private import compat as torch_compat


def rank_of(group: str) -> int:
    """Return this process's rank in the group of that name."""
    return int(torch_compat.process_group(group).rank())


def ranks_of(group: str) -> frozenset[int]:
    """Return the global ranks of the group of that name."""
    return frozenset(dist.get_process_group_ranks(torch_compat.process_group(group)))


class RanksDisagree(Exception):
    """Messages of the ranks of a group differ, or one is missing. Internal: users see a ContextParallelUnsupported."""


#: separates a message from its details, which are not compared
TOLD = "\n\n"
#: seconds until a rank that waits in a call asks why, and seconds that it waits for further messages after one has differed
_STALLED, _GRACE = 0.25, 2.0
#: seconds within which it polls without sleeping
_SOON = 0.001


@dataclasses.dataclass(kw_only=True, slots=True)
class _Scope:
    """Messages and calls of this process among the ranks of a group. name: of the group in the store.

    said: the number of messages. entered: calls since the last one. runs: calls of each code. differs: the last message was not the same on
    all ranks.
    """

    store: Any
    name: str
    own: int
    size: int
    said: int = 0
    entered: int = 0
    runs: dict[str, int] = dataclasses.field(default_factory=dict)
    differs: bool = False

    def key(self, rank: int, ahead: int = 0) -> str:
        return f"attn_compiler/{self.name}/{self.said + ahead}/{rank}"

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.own]


#: by the name of a group; groups of the same ranks share one
_scopes: dict[str, _Scope] = {}


def _scope(group: str) -> _Scope:
    store = torch_compat.default_store()
    found = _scopes.get(group)
    # A new group has another store, without messages.
    if found is None or found.store is not store:
        process_group = torch_compat.process_group(group)
        name = "-".join(map(str, dist.get_process_group_ranks(process_group)))
        alike = (one for one in _scopes.values() if one.name == name and one.store is store)
        made = _Scope(store=store, name=name, own=process_group.rank(), size=process_group.size())
        found = _scopes[group] = next(alike, made)
    return found


def agree(group: str, subject: str, said: str, *, seconds: float) -> None:
    """Wait until every rank of the group has sent its message. Raises RanksDisagree, on all of them, if they differ.

    subject: of the comparison, for the error. Ranks that have compiled something else before number their graphs in another way. said: the
    message. The part behind TOLD is not compared, and is shown if something before it differs.
    """
    keys = send(group, said)
    scope = _scopes[group]
    found = _heard(scope, keys, seconds, lambda text: not _is_same(text, said))
    if len(found) < scope.size and all(_is_same(text, said) for text in found.values()):
        raise _missing(scope, found, subject, seconds)
    if not all(_is_same(text, said) for text in found.values()):
        raise _differing(scope, found)


def answers(group: str, subject: str, said: str, *, seconds: float) -> list[str]:
    """Return every rank's message. Raises RanksDisagree if one is missing.

    It uses the store of the process group: no collective runs, so none can hang. The n-th message of one rank is compared with the n-th of
    the others, whatever the subject.
    """
    keys = send(group, said)
    scope = _scopes[group]
    found = _heard(scope, keys, seconds, lambda text: False)
    if len(found) < scope.size:
        raise _missing(scope, found, subject, seconds)
    return [found[rank] for rank in range(scope.size)]


def send(group: str, said: str) -> list[str]:
    """Send a message without waiting. Return the keys of all ranks' messages."""
    scope = _scope(group)
    scope.said, scope.entered, scope.runs, scope.differs = scope.said + 1, 0, {}, False
    keys = [scope.key(rank) for rank in range(scope.size)]
    scope.store.set(keys[scope.own], said)
    return keys


def is_at_odds(group: str) -> bool:
    """Return True if this rank or another one has reported a failure, and no message followed."""
    return _scope(group).differs


def enter(group: str, code: str, told: str) -> None:
    """Wait until every rank of the group is about to run the same compiled code.

    Raises RanksDisagree, on all of them, if one compiles instead, failed to, or runs other code. code: its name on all ranks. told: details
    of this call for the error. It takes one request to the store, or a few if others come later. The store keeps one number for each code,
    and nothing for a call.
    """
    scope = _scope(group)
    key = f"attn_compiler/{scope.name}/{scope.said}/runs/{code}"
    scope.entered += 1
    count = scope.runs[code] = scope.runs.get(code, 0) + 1
    if scope.store.add(key, 1) < count * scope.size:
        _wait_in_call(group, scope, key, code, told)


def _wait_in_call(group: str, scope: _Scope, key: str, code: str, told: str) -> None:
    expected, began, pause, is_told = scope.runs[code] * scope.size, time.monotonic(), 0.0, False
    while scope.store.add(key, 0) < expected:
        waited = time.monotonic() - began
        if waited > _STALLED:
            if not is_told:
                is_told = True
                scope.store.set(_waiting_key(scope, scope.own), f"{scope.entered} {code}")
            if _is_elsewhere(scope, code):
                keys = send(group, told)
                raise _differing(scope, _heard(scope, keys, _GRACE, lambda text: False))
            if waited > scope.store.timeout.total_seconds():
                raise RanksDisagree(f"a rank did not come to this call within {waited:.0f} s")
        # The others usually arrive within a moment, and a request takes as long as the shortest sleep.
        if waited > _SOON:
            time.sleep(pause)
            pause = min(2 * pause + 1e-4, 0.05)


def _waiting_key(scope: _Scope, rank: int) -> str:
    return f"attn_compiler/{scope.name}/{scope.said}/waits/{rank}"


def _is_elsewhere(scope: _Scope, code: str) -> bool:
    """Return True if another rank sent a message instead of coming to this call, or waits in a call of other code."""
    for rank in scope.others:
        if scope.store.check([scope.key(rank, ahead=1)]):
            return True
        waiting = _waiting_key(scope, rank)
        if scope.store.check([waiting]):
            entered, _, other = scope.store.get(waiting).decode().partition(" ")
            # Its note of an earlier call is outdated.
            if int(entered) == scope.entered and other != code:
                return True
    return False


def _heard(scope: _Scope, keys: list[str], seconds: float, ends: Callable[[str], bool]) -> dict[int, str]:
    """Collect messages by rank: of all, or those that arrive within so many seconds. ends: True for a message after which the others have
    little time left."""
    found: dict[int, str] = {}
    deadline, is_ending = time.monotonic() + seconds, False
    pause = 0.001
    while True:
        for rank, key in enumerate(keys):
            if rank not in found and scope.store.check([key]):
                found[rank] = scope.store.get(key).decode()
                if ends(found[rank]) and not is_ending:
                    is_ending, deadline = True, min(deadline, time.monotonic() + _GRACE)
        if len(found) == len(keys) or time.monotonic() > deadline:
            return found
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _is_same(a: str, b: str) -> bool:
    return a.partition(TOLD)[0] == b.partition(TOLD)[0]


def _missing(scope: _Scope, found: dict[int, str], subject: str, seconds: float) -> RanksDisagree:
    scope.differs = True
    rank = next(rank for rank in range(scope.size) if rank not in found)
    return RanksDisagree(f"rank {rank} did not come to {subject} within {seconds:.0f} s")


def _differing(scope: _Scope, found: dict[int, str]) -> RanksDisagree:
    """Return an error with the differing lines of each rank that differs from this one."""
    scope.differs = True
    mine = found[scope.own]
    said: list[str] = []
    for rank in scope.others:
        if rank in found and found[rank] != mine:
            own, theirs = _lines(mine, found[rank]), _lines(found[rank], mine)
            only = ", ".join(line for line in own if line not in theirs)
            said += [*([f"rank {scope.own}: {only}"] if not said else []), f"rank {rank}: "]
            said[-1] += ", ".join(line for line in theirs if line not in own)
    lost = [f"rank {rank} has not come" for rank in scope.others if rank not in found]
    return RanksDisagree("; ".join([*said, *lost]))


def _lines(text: str, beside: str) -> list[str]:
    """Return the comparable lines of a rank's message: a failure has no call to compare."""
    found = [line for line in text.split("\n") if line]
    return found[:1] if TOLD in text and TOLD not in beside else found


def is_fake(group: str) -> bool:
    """Return True if the group has no other processes: PyTorch's fake process group computes one rank's part alone."""
    return dist.get_backend(torch_compat.process_group(group)) == "fake"


# ---- what users are told: ranks compile together, and call the same compiled code ------------------------------------


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A meeting of a group of ranks before a graph runs. group, code: names of the group and of the graph.

    told: this rank's facts where ranks may differ, one on each line.
    """

    group: str
    code: str
    told: str


def in_step(compiled: Callable[..., Any], meetings: Sequence[Meeting]) -> Callable[..., Any]:
    """Return a graph's compiled function with a meeting of the ranks before each call."""
    met = [one for one in meetings if not is_fake(one.group)]
    if not met:
        return compiled

    def call(*args: Any) -> Any:
        for one in met:
            try:
                enter(one.group, one.code, one.told)
            except RanksDisagree as differ:
                raise _told(str(differ)) from differ
        return compiled(*args)

    return call


def _told(observed: str) -> ContextParallelUnsupported:
    return ContextParallelUnsupported(
        module="the graph",
        source=None,
        rule="all ranks call the same compiled code, and compile together",
        observed=observed,
        remedy="give every rank the same batch size, length, dtypes, strides and modes (torch.no_grad) in each call",
    )


@contextlib.contextmanager
def telling_of_failure(group: str | None, starts_over: Callable[[Exception], bool]) -> Iterator[None]:
    """Tell the ranks that share a sequence if this one can't compile: they would wait for it.

    group: the name of their group; None: no sequence is shared. starts_over: recognises exceptions that are no failure.
    """
    try:
        yield
    except Exception as error:
        if group is not None and not starts_over(error) and not is_fake(group) and not is_at_odds(group):
            send(group, f"could not compile: {described(error)}")
        raise
