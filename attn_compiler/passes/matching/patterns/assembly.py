"""Last step of every pattern: settle the axes of all tensors, then decide which batch axes are heads."""

from __future__ import annotations

from typing import Any

from attn_compiler.passes.graph import axes
from attn_compiler.passes.graph.axes import Dim, Dims
from attn_compiler.passes.graph.site import Match, Operand, SiteAxes, SiteScores
from attn_compiler.passes.matching import operands


def assemble(
    *,
    batch_dims: Dims,
    query: Dim,
    key: Dim,
    head_dim_qk: Dim,
    head_dim_v: Dim,
    q: Operand,
    k: Operand,
    v: Operand,
    scores: SiteScores,
    **parts: Any,
) -> Match:
    """Make a Match from a pattern's findings. batch_dims: the batch and head axes of the scores, outermost first."""
    operands.settle([q, k, v, *scores.operands])
    match = Match(
        q=q,
        k=k,
        v=v,
        axes=SiteAxes(
            query=query,
            key=key,
            head_dim_qk=head_dim_qk,
            head_dim_v=head_dim_v,
            **heads(batch_dims, k, v, scores.sinks),
        ),
        scores=scores,
        **parts,
    )
    match.notes = (*match.notes, *_notes(match))
    return match


def heads(batch_dims: Dims, k: Operand, v: Operand, sinks: Operand | float | None) -> dict[str, Dim]:
    """Tell apart the axes of the batch, of the heads and of the key/value heads. Sinks vary along heads alone."""
    atoms = axes.flat(batch_dims)
    shared = _shared_tail(atoms, k, v)
    of_sinks = (i for i, atom in enumerate(atoms) if isinstance(sinks, Operand) and sinks.varies_along(atom))
    start = min(_first_head(atoms, shared), *of_sinks, len(atoms))
    return {"batch": atoms[:start], "heads": atoms[start:], "heads_kv": atoms[start : len(atoms) - shared]}


def _shared_tail(atoms: Dim, k: Operand, v: Operand) -> int:
    """Count the innermost axes that K and V are both repeated along: query heads that share one key/value head."""
    shared = 0
    for atom in reversed(atoms):
        if k.varies_along(atom) or v.varies_along(atom) or atom.size == axes.ONE:
            break
        shared += 1
    return shared


def _first_head(atoms: Dim, shared: int) -> int:
    """Index of the first head axis. Heads are the last axis; with shared heads also the axis of their groups, if a batch axis is left.

    An axis of unknown size is batch: no model computes its number of heads, and kernels need to know it.
    """
    own = len(atoms) - shared
    if own == 0 or (shared and own == 1) or not atoms[own - 1].size.is_Integer:
        return own
    return own - 1


def _notes(match: Match) -> list[str]:
    notes = []
    grouped = len(match.axes.heads_kv) < len(match.axes.heads)
    if grouped and (_repeated(match.k) or _repeated(match.v)):
        group = axes.dim_size(match.axes.heads) / axes.dim_size(match.axes.heads_kv)
        notes.append(f"K/V read without their {group}-fold repetition")
    return notes


def _repeated(operand: Operand) -> bool:
    read = (operand.reads.get(atom) for dim in operand.dims for atom in axes.resolve(dim))
    return any(atom is not None and atom.broadcast for atom in read)
