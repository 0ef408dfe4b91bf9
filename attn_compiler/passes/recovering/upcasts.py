"""Scores that a model computes in float32 of half-precision q and k, "for stability": a half-precision kernel computes the same.

A product of two bfloat16 or float16 numbers is exact in float32, which is what a kernel adds them up in; scores, masks and the softmax stay
in float32 in a kernel. So q and k are read above their cast, where the model casts its weights back for the product with v. A model that
trains keeps the casts: a kernel rounds the gradients of the scores, which the model keeps in float32. So does a CPU, where a kernel for
half precision is not faster.

Of bfloat16, a kernel for training may make its products in tf32, which has all digits of q, k, v and of the output's gradient. Only weights
and the gradients of scores are cut, to 11 digits, where the model rounds its weights and their gradients to 8.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match, Operand
from attn_compiler.passes.matching import operands
from attn_compiler.spec.dtypes import HALVES

NOTE = "q and k are read before the model casts them to float32, which a kernel computes in anyway"


def read_through(mirror: Mirror, match: Match) -> torch.dtype | None:
    """The half-precision dtype that the site's operands have, if its kernel may go without the casts of q and k; q and k lose them then."""
    narrow = _upcast(match)
    if narrow is None:
        return None
    # q is multiplied by a factor that is a tensor, and the result is rounded to q's dtype. A bias is cast to that dtype, too.
    if match.scores.factors or any(
        _dtype(term.operand.root) not in (narrow, torch.bool) for term in match.scores.additive
    ):
        return None
    with_casts = match.q, match.k
    try:
        (match.q, q_factor), (match.k, k_factor) = (_above_cast(mirror, match, operand) for operand in with_casts)
        if {_dtype(match.q.root), _dtype(match.k.root)} == {narrow}:
            _settle(match)
            match.scores = replace(match.scores, scale=match.scores.scale * q_factor * k_factor)
            match.notes = (*match.notes, NOTE)
            return narrow
    except AxisError:
        # The axes above the cast can't be followed: the site is as it was.
        pass
    match.q, match.k = with_casts
    _settle(match)
    return None


def holds_bfloat16(mirror: Mirror, match: Match) -> bool:
    """Whether q and k, as a kernel reads them, are bfloat16 numbers that the model holds in float32, and so are v and the weights there."""
    if _upcast(match) != torch.bfloat16 or match.scores.factors or _dtype(match.v.root) != torch.bfloat16:
        return False
    try:
        found = [_above_cast(mirror, match, operand) for operand in (match.q, match.k)]
    except AxisError:
        return False
    return all(_dtype(operand.root) == torch.bfloat16 and factor == 1.0 for operand, factor in found)


def _upcast(match: Match) -> torch.dtype | None:
    """The half-precision dtype that a site gives its output in, and weighs v in, where its scores are float32."""
    narrow = _dtype(match.out)
    if _is_on_cpu(match.out) or narrow not in HALVES or _dtype(match.first) != torch.float32:
        return None
    return narrow if match.scores.softmax_dtype == "float32" else None


def _settle(match: Match) -> None:
    terms = [term.operand for term in match.scores.terms]
    operands.settle([match.q, match.k, match.v, *terms])


def _is_on_cpu(node: torch.fx.Node) -> bool:
    return bool(node.meta["val"].device.type == "cpu")


def _above_cast(mirror: Mirror, match: Match, operand: Operand) -> tuple[Operand, float]:
    """The operand above its casts, and what constant factor is left out there that was not before. Raises AxisError."""
    (_, before), (found, after) = (
        operands.read(
            mirror,
            operand.node,
            operand.dims,
            used=operand.used,
            until=match.out,
            through_scales=True,
            through_upcasts=through,
        )
        for through in (False, True)
    )
    return found, after / before


def _dtype(node: torch.fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
