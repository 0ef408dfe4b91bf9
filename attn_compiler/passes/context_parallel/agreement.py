"""A graph is rewritten on all ranks that share its sequence, or on none: they compare their findings before one of them goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from attn_compiler.context_parallel import ContextParallel
from attn_compiler.context_parallel.lockstep import Meeting
from attn_compiler.passes.context_parallel import rank_facts
from attn_compiler.passes.context_parallel.refusing import CannotShard
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.unit import Unit, module_path, source_line
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reasons.errors import ContextParallelUnsupported, described
from attn_compiler.torch_private import compat as torch_compat, rank_sync
from attn_compiler.torch_private.rank_sync import TOLD

#: seconds to wait until all ranks have compiled a graph: cold caches of one may take minutes
_PATIENCE = 900.0


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """The outcome for a graph on one rank. text: all ranks have to agree on it. exchanges: ranks wait for each other when it runs."""

    text: str
    exchanges: bool


def rewrite_on_all_ranks(
    unit: Unit,
    mirror: Mirror,
    cp: ContextParallel,
    beside: Sequence[str],
    of_call: Sequence[str],
    rewrite: Callable[[], RankOutcome],
) -> tuple[Meeting, ...]:
    """Rewrite a graph on all ranks, or raise on all of them. Returns where they meet before each call.

    beside: groups of ranks that have other heads. of_call: the facts of this call (rank_facts.py).
    """
    error: Exception | None = None
    try:
        found = rewrite()
    except CannotShard as cannot:
        error = as_user_error(mirror, cannot.at, cannot.reason)
        found = RankOutcome(text=f"error: {error}", exchanges=False)
    except Exception as failed:  # noqa: BLE001 (it is raised below)
        # The others must not wait for a rank that has failed.
        error, found = failed, RankOutcome(text=f"error: {described(failed)}", exchanges=False)
    subject = f"graph {torch_compat.graph_name()}{unit.name}"
    same = "\n".join([found.text, *rank_facts.option_facts(unit.options)])
    beside_of_call = TOLD + "\n".join(of_call)
    try:
        rank_sync.agree(cp.group_name, subject, f"compiles\n{same}{beside_of_call}", seconds=_PATIENCE)
    except rank_sync.RanksDisagree as differ:
        remedy = "give every rank a batch of the same shapes (ContextParallel.shard does), the same options and the same modes"
        error = _differing(mirror, differ, remedy, error)
    # Tensor parallelism: a failure for one share of the heads must not leave the others in a collective.
    for group in beside:
        has_failed = "compiles" if error is None else "compiles\nan error"
        try:
            rank_sync.agree(group, subject, has_failed + beside_of_call, seconds=_PATIENCE)
        except rank_sync.RanksDisagree as differ:
            remedy = "the error is told on the rank that has it: heads that all ranks have as many of may help"
            error = error or _differing(mirror, differ, remedy, None)
    if error is not None:
        raise error
    if not found.exchanges:
        return ()
    code, runs = hashlib.sha256(same.encode()).hexdigest()[:16], f"runs {subject}, which it has\n{same}{beside_of_call}"
    # Shares of heads may differ, so their graphs have no name in common.
    named = [(cp.group_name, code), *((group, "a share of the heads") for group in beside)]
    return tuple(Meeting(group=group, code=name, told=runs) for group, name in named)


def _differing(
    mirror: Mirror, differ: rank_sync.RanksDisagree, remedy: str, cause: Exception | None
) -> ContextParallelUnsupported:
    reason = Reason(
        code=Code.CONTEXT_PARALLEL_UNSUPPORTED,
        rule="all ranks compile the same graph",
        observed=str(differ),
        remedy=remedy,
    )
    found = as_user_error(mirror, None, reason)
    found.__cause__ = cause
    return found


def as_user_error(mirror: Mirror | None, at: fx.Node | None, reason: Reason) -> ContextParallelUnsupported:
    """Return a reason as the error that users see. at: the mirror node that it is about."""
    is_here = mirror is not None and at is not None and at.graph is mirror.graph
    owner = mirror.owner(at) if is_here and mirror is not None and at is not None else None
    return ContextParallelUnsupported(
        module="the graph" if owner is None else module_path(owner),
        source=None if owner is None else source_line(owner),
        rule=reason.rule,
        observed=reason.observed,
        remedy=reason.remedy,
    )
