"""The check of a rewritten graph after it is matched again: it has the attentions that were written, and all ranks have the same."""

from __future__ import annotations

import hashlib

from attn_compiler.passes.context_parallel.agreement import RankOutcome, rewrite_on_all_ranks
from attn_compiler.passes.context_parallel.decoding import amount, note_decoding
from attn_compiler.passes.context_parallel.refusing import CannotShard
from attn_compiler.passes.context_parallel.spread import Rewrite, SequenceRewrite, SlotRewrite, Spread
from attn_compiler.passes.graph.first_look import SharedGraph
from attn_compiler.passes.graph.unit import FoundSites, Unit


def agree(unit: Unit, found: FoundSites, spread: Spread, failed: Exception | None) -> SharedGraph:
    """Raise ContextParallelUnsupported on all ranks if one could not rewrite its graph. failed: the exception of matching it again."""

    def said() -> RankOutcome:
        error = spread.error or failed
        if error is not None:
            raise error
        return _said(found, spread)

    meetings = rewrite_on_all_ranks(unit, spread.mirror, spread.cp, spread.beside, spread.call, said)
    return SharedGraph(first_look=None if spread.rewrite is None else spread.rewrite.look, meetings=meetings)


def _said(found: FoundSites, spread: Spread) -> RankOutcome:
    """Return the facts that all ranks have to agree on. Raises CannotShard."""
    rewrite = spread.rewrite
    if rewrite is None:
        raise ValueError("the graph was not rewritten")
    if spread.is_other_graph:
        _check_all_found(found, rewrite)
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


def _check_all_found(found: FoundSites, rewrite: Rewrite) -> None:
    if len(found.misses) > rewrite.misses or len(found.sites) != rewrite.sites:
        observed = str(found.misses[0].reason) if found.misses else f"{len(found.sites)} of {rewrite.sites}"
        raise CannotShard("each rewritten attention is understood again", observed)


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
