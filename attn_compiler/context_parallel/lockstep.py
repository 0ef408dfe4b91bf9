"""Ranks that share a sequence compile together and call the same compiled code: if one does something else, each of them raises.

Their collectives are in the graph. A rank that ran it alone would wait for the others in a collective, which nobody can end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attn_compiler.reasons.errors import ContextParallelUnsupported, described


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
    from attn_compiler.torch_private import rank_sync

    met = [one for one in meetings if not rank_sync.is_fake(one.group)]
    if not met:
        return compiled

    def call(*args: Any) -> Any:
        for one in met:
            try:
                rank_sync.enter(one.group, one.code, one.told)
            except rank_sync.RanksDisagree as differ:
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
        if group is not None and not starts_over(error):
            from attn_compiler.torch_private import rank_sync

            if not rank_sync.is_fake(group) and not rank_sync.is_at_odds(group):
                rank_sync.send(group, f"could not compile: {described(error)}")
        raise
