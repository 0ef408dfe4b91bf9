"""Reasons why a fully read tensor is no proved mask: its added values may or may not mask keys."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr.reach import is_known
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW
from attn_compiler.passes.recovering.reading import fake
from attn_compiler.spec.added_scores import BiasFormula, GatheredBias, Penalty, ProvedScore, RegionPenalty

#: characters of a formula in a reason
_MOST = 120


def of_bias(version: Version, origin: str) -> str:
    """Return the reason for an added tensor. origin: why nothing is known of its elements."""
    tensor = fake(version.node)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return f"{origin}: it may mask too"
    return (
        f"{origin}: it may mask too. It holds whole numbers, and nothing says that they are 0 and 1 alone: truth values tell "
        f"(mask.bool(), say), times a number from {MASKED_BELOW:g} down"
    )


def why(kinds: Iterable[ProvedScore]) -> str | None:
    """Return why the first unclear score kind may mask, and the remedy. None if all are known to be no mask (ALiBi, T5's buckets)."""
    return next((told for kind in kinds if (told := _of(kind)) is not None), None)


def _of(kind: ProvedScore) -> str | None:
    match kind:
        case Penalty(value=value) | RegionPenalty(value=value):
            return (
                f"{value:g} is added where keys are to be left out, and that is too near to zero to mask for certain: a number that is "
                f"added masks at {MASKED_BELOW:g} or below"
            )
        case BiasFormula(value=x):
            return _of_formula(x)
        case GatheredBias():
            return f"{kind.table} is known at run time only: it may mask too"
        case _:
            return None


def _of_formula(x: ix.Expr) -> str:
    loaded = {load.tensor: load.kind for load in ix.loads(x)}
    if is_known(x):
        return f"{ix.text(x, _MOST)} is not read as numbers that mask"
    name = next(iter(loaded))
    if all(kind == "int" for kind in loaded.values()):
        return (
            f"{name} holds whole numbers, and nothing says that they are 0 and 1 alone: {ix.text(x, _MOST)} may mask, or add. "
            f"Truth values ({name}.bool(), say) tell"
        )
    return f"{name} is known at run time only: {ix.text(x, _MOST)} may mask, or add"
