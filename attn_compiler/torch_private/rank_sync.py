"""How the ranks of a group tell each other what they are about to do: by the store that the processes found each other with, where no
collective can hang. While they compile they compare what they found, and before each call of compiled code that it is the same code.

What is said is counted on each rank. The n-th time on one meets the n-th on the others, and calls meet between two of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any


def rank_of(group: str) -> int:
    """This process' place in the group of that name."""
    return int(_process_group(group).rank())


def ranks_of(group: str) -> frozenset[int]:
    """The ranks of the group of that name, as the world numbers them."""
    from torch.distributed import distributed_c10d as c10d

    return frozenset(c10d.get_process_group_ranks(_process_group(group)))


def _process_group(name: str) -> Any:
    from torch.distributed import distributed_c10d as c10d

    return c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


class RanksDisagree(Exception):
    """What the ranks of a group said is not the same, or one said nothing. Internal: a ContextParallelUnsupported says it to users."""


#: what stands before what is told with an answer, and is not compared
TOLD = "\n\n"
#: seconds after which a rank that waits in a call asks why, and for which it hears what the others have to say after one has differed
_STALLED, _GRACE = 0.25, 2.0
#: seconds within which it asks again at once
_SOON = 0.001


@dataclasses.dataclass(kw_only=True, slots=True)
class _Scope:
    """What this process has said and called among the ranks of a group. name: of the group in the store. said: how often it said something.
    entered: calls since then. runs: those of each code. differs: what was said last was not the same on all ranks."""

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


#: by the name of a group; those of the same ranks have one
_scopes: dict[str, _Scope] = {}


def _scope(group: str) -> _Scope:
    from torch.distributed import distributed_c10d as c10d

    store = c10d._get_default_store()
    found = _scopes.get(group)
    # Groups that are made anew have another store, where nothing was said yet.
    if found is None or found.store is not store:
        process_group = _process_group(group)
        name = "-".join(str(rank) for rank in c10d.get_process_group_ranks(process_group))
        alike = (one for one in _scopes.values() if one.name == name and one.store is store)
        made = _Scope(store=store, name=name, own=process_group.rank(), size=process_group.size())
        found = _scopes[group] = next(alike, made)
    return found


def agree(group: str, subject: str, said: str, *, seconds: float) -> None:
    """Wait until every rank of the group has said something of the subject. Raises RanksDisagree, on all of them, where they differ.

    subject: what is compared, for the error. Ranks that have compiled something else before number their graphs in another way.
    said: what stands behind TOLD is not compared, and is told where something before it differs.
    """
    keys = say(group, said)
    scope = _scopes[group]
    found = _heard(scope, keys, seconds, lambda text: not _is_same(text, said))
    if len(found) < scope.size and all(_is_same(text, said) for text in found.values()):
        raise _missing(scope, found, subject, seconds)
    if not all(_is_same(text, said) for text in found.values()):
        raise _differing(scope, found)


def answers(group: str, subject: str, said: str, *, seconds: float) -> list[str]:
    """What every rank of the group said of the subject. Raises RanksDisagree if one says nothing.

    By the store that the processes found each other with: no collective runs, so none can hang. The n-th time on one rank meets the n-th
    on the others, whatever the subject.
    """
    keys = say(group, said)
    scope = _scopes[group]
    found = _heard(scope, keys, seconds, lambda text: False)
    if len(found) < scope.size:
        raise _missing(scope, found, subject, seconds)
    return [found[rank] for rank in range(scope.size)]


def say(group: str, said: str) -> list[str]:
    """Say something, and wait for nobody. The keys under which the ranks of the group say it."""
    scope = _scope(group)
    scope.said, scope.entered, scope.runs, scope.differs = scope.said + 1, 0, {}, False
    keys = [scope.key(rank) for rank in range(scope.size)]
    scope.store.set(keys[scope.own], said)
    return keys


def is_at_odds(group: str) -> bool:
    """Whether the others have been told that this rank fails, or have told it, and nothing was said since."""
    return _scope(group).differs


def enter(group: str, code: str, told: str) -> None:
    """Wait until every rank of the group is about to run the same compiled code. Raises RanksDisagree, on all of them, where one compiles
    instead, failed to, or runs other code.

    code: what it is called on all ranks. told: what is said of this call if ranks differ. One request to the store, or a few where others
    come later; it keeps one number for each code, and nothing for a call.
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
                keys = say(group, told)
                raise _differing(scope, _heard(scope, keys, _GRACE, lambda text: False))
            if waited > scope.store.timeout.total_seconds():
                raise RanksDisagree(f"a rank did not come to this call within {waited:.0f} s")
        # The others are most often a moment away, and to ask takes as long as the shortest sleep.
        if waited > _SOON:
            time.sleep(pause)
            pause = min(2 * pause + 1e-4, 0.05)


def _waiting_key(scope: _Scope, rank: int) -> str:
    return f"attn_compiler/{scope.name}/{scope.said}/waits/{rank}"


def _is_elsewhere(scope: _Scope, code: str) -> bool:
    """Whether another rank has said something instead of coming to this call, or waits for the others in a call of other code."""
    for rank in scope.others:
        if scope.store.check([scope.key(rank, ahead=1)]):
            return True
        waiting = _waiting_key(scope, rank)
        if scope.store.check([waiting]):
            entered, _, other = scope.store.get(waiting).decode().partition(" ")
            # What it said of an earlier call is no longer so.
            if int(entered) == scope.entered and other != code:
                return True
    return False


def _heard(scope: _Scope, keys: list[str], seconds: float, ends: Callable[[str], bool]) -> dict[int, str]:
    """What ranks have said, by rank: of all, or of those who did within so many seconds. ends: of what is said; the others have but a
    little time to say something, too."""
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
    """Of each rank that differs from this one, the lines that do."""
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
    """Of what a rank said, what may be held against what another one said: a failure has no call to compare."""
    found = [line for line in text.split("\n") if line]
    return found[:1] if TOLD in text and TOLD not in beside else found


def is_fake(group: str) -> bool:
    """Whether the other ranks of a group are not there: PyTorch's fake process group computes what one rank would."""
    from torch.distributed import distributed_c10d as c10d

    return c10d.get_backend(_process_group(group)) == "fake"
