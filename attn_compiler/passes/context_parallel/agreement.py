"""A graph is rewritten on all ranks that share its sequence, or on none: they compare their findings before one of them goes on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.context_parallel import ContextParallel, rank_sync
from attn_compiler.context_parallel.rank_sync import TOLD, Meeting
from attn_compiler.options.options import Options
from attn_compiler.passes.context_parallel.decoding import SlotOutcome, amount, note_decoding
from attn_compiler.passes.context_parallel.first_look import FirstLook, SharedGraph
from attn_compiler.passes.context_parallel.following import is_state
from attn_compiler.passes.context_parallel.places import CannotShard
from attn_compiler.passes.context_parallel.sites import RewrittenSite
from attn_compiler.passes.graph import closed
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.onward import Trial
from attn_compiler.passes.graph.unit import FoundSites, Unit, module_path, source_line
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.reasons.errors import ContextParallelUnsupported, described
from attn_compiler.torch_private import compat as torch_compat, frames as torch_frames

# ---- the state of a graph between the rewriting of its attentions and the agreement of its ranks ---------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewrite:
    """The rewriting of a graph. sites, misses: the numbers to be found when it is matched again. look: with options.verify."""

    sites: int
    misses: int
    look: FirstLook | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceRewrite(Rewrite):
    """The rewriting over a shared sequence. shared: the attentions whose keys several ranks have. lengths: positions that a rank has.

    done: by the module of each of these. by_value: a note where numbers of the length were looked for by their values alone.
    """

    shared: int
    lengths: tuple[int, ...]
    done: Mapping[str, RewrittenSite]
    by_value: str


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotRewrite(Rewrite):
    """The rewriting of a graph with a cache that ranks share."""

    outcome: SlotOutcome


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread(Trial):
    """A graph that was rewritten, or has an error, and that its ranks have to agree on.

    beside: groups of ranks that have other heads. mirror: of the graph as it came. call: the facts of the call for the other ranks.
    """

    cp: ContextParallel
    beside: tuple[str, ...]
    mirror: Mirror
    call: tuple[str, ...]
    rewrite: SequenceRewrite | SlotRewrite | None = None
    error: Exception | None = None

    @property
    def is_other_graph(self) -> bool:
        rewrite = self.rewrite
        return isinstance(rewrite, SequenceRewrite) or (isinstance(rewrite, SlotRewrite) and bool(rewrite.outcome.sent))


# ---- a rank's facts for the ranks that share its sequence: its options, and the properties of its call ---------------


#: options that change neither code nor what ranks exchange
_OWN = frozenset({"strict", "dump_dir", "check_invariants", "cache_rewrites"})


def option_facts(options: Options) -> list[str]:
    """Return a line for each option that all ranks have to set alike."""
    found = []
    for name in (field.name for field in dataclasses.fields(options) if field.name not in _OWN):
        value = getattr(options, name)
        found += _of_description(value) if isinstance(value, ContextParallel) else [f"{name}: {value!r}"]
    return found


def _of_description(cp: ContextParallel) -> list[str]:
    order = "head_tail" if cp.is_balanced else None
    alike = {"replicated": sorted(set(cp.replicated)), "allow": sorted(set(cp.allow))}
    given = {"method": cp.method, "load_balance": order, **alike, "packed": cp.packed, "gather_limit": cp.gather_limit}
    return [f"{name}: {value!r}" for name, value in given.items()]


def call_facts(graph: fx.Graph) -> list[str]:
    """Return a line for each property that tells this call from others of the graph, and why it was compiled if there was other code."""
    found = [f"with gradients: {torch.is_grad_enabled()}", *_of_inputs(graph)]
    why = torch_frames.recompilation_reason()
    return found if why is None else [*found, f"the code that was there did not serve: {why}"]


def _of_inputs(graph: fx.Graph) -> Iterator[str]:
    for node in graph.find_nodes(op="placeholder"):
        x = node.meta.get("example_value")
        if is_state(node) or not isinstance(x, torch.Tensor):
            continue
        if closed.holds_closed(x):
            yield f"{node.name}: {type(x).__name__} {tuple(x.shape)}"
            continue
        gradient = ", requires a gradient" if x.requires_grad else ""
        yield f"{node.name}: {x.dtype} {tuple(x.shape)}, strides {x.stride()}{gradient}"


#: seconds to wait until all ranks have compiled a graph: cold caches of one may take minutes
_PATIENCE = 900.0


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """The outcome for a graph on one rank. text: all ranks have to agree on it. exchanges: ranks wait for each other when it runs."""

    text: str
    exchanges: bool


def rewrite_on_all_ranks(unit: Unit, trial: Spread, rewrite: Callable[[], RankOutcome]) -> tuple[Meeting, ...]:
    """Rewrite a graph on all ranks, or raise on all of them. Returns where they meet before each call."""
    mirror, group_name = trial.mirror, trial.cp.group_name
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
    same = "\n".join([found.text, *option_facts(unit.options)])
    beside_of_call = TOLD + "\n".join(trial.call)
    try:
        rank_sync.agree(group_name, subject, f"compiles\n{same}{beside_of_call}", seconds=_PATIENCE)
    except rank_sync.RanksDisagree as differ:
        remedy = "give every rank a batch of the same shapes (ContextParallel.shard does), the same options and the same modes"
        error = _differing(mirror, differ, remedy, error)
    # Tensor parallelism: a failure for one share of the heads must not leave the others in a collective.
    for group in trial.beside:
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
    named = [(group_name, code), *((group, "a share of the heads") for group in trial.beside)]
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


# ---- the judge -------------------------------------------------------------------------------------------------------


def agree(unit: Unit, found: FoundSites, trial: Spread, failed: Exception | None) -> SharedGraph:
    """Raise ContextParallelUnsupported on all ranks if one could not rewrite its graph. failed: the exception of matching it again."""

    def said() -> RankOutcome:
        error = trial.error or failed
        if error is not None:
            raise error
        return _said(found, trial)

    meetings = rewrite_on_all_ranks(unit, trial, said)
    return SharedGraph(first_look=None if trial.rewrite is None else trial.rewrite.look, meetings=meetings)


def complete(unit: Unit) -> None:
    """Complete the record of the graph as it was, after all passes."""
    outcome = unit.outcome
    if isinstance(outcome, SharedGraph) and outcome.first_look is not None:
        look = outcome.first_look.completed(unit.graph, unit.mirrored, unit.found.sites)
        unit.outcome = dataclasses.replace(outcome, first_look=look)


def _said(found: FoundSites, spread: Spread) -> RankOutcome:
    """Return the facts that all ranks have to agree on. Raises CannotShard."""
    rewrite = spread.rewrite
    if rewrite is None:
        raise ValueError("the graph was not rewritten")
    all_found = len(found.sites) == rewrite.sites and len(found.misses) <= rewrite.misses
    if spread.is_other_graph and not all_found:
        observed = str(found.misses[0].reason) if found.misses else f"{len(found.sites)} of {rewrite.sites}"
        raise CannotShard("each rewritten attention is understood again", observed)
    specs = [site.spec.to_text() for site in found.sites if site.spec is not None]
    if isinstance(rewrite, SlotRewrite):
        outcome = rewrite.outcome
        note_decoding(found, outcome, spread.cp.size)
        text = f"{len(outcome.sent)} attentions to slots, {len(outcome.kept)} that gather, {_digest(specs)}"
        return RankOutcome(text=text, exchanges=True)
    _note(found, spread, rewrite)
    digest = _digest([*specs, *(one.words for one in rewrite.done.values())])
    text = f"{rewrite.shared} attentions, {list(rewrite.lengths)} positions, {digest}"
    return RankOutcome(text=text, exchanges=bool(rewrite.shared))


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _note(found: FoundSites, spread: Spread, rewrite: SequenceRewrite) -> None:
    cp = spread.cp
    order = "head-tail" if cp.is_balanced else "contiguous"
    for site in found.sites:
        one = rewrite.done.get(site.module)
        if one is None:
            site.notes.append("context parallel: every rank has all of its keys")
            continue
        why = ("" if one.why is None else f"; {one.why}") + rewrite.by_value
        site.notes.append(
            f"context parallel: {one.words} over {cp.size} ranks, {order} positions, a rank sends {amount(one.bytes)} in the forward{why}"
        )
