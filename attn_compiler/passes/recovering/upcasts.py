"""Scores computed in float32 from half-precision q and k, "for stability": a half-precision kernel computes the same.

A product of two bfloat16 or float16 numbers is exact in float32, and a kernel accumulates in float32. Its scores, masks and softmax stay in
float32, too. So q and k are read above their cast if the model casts its weights back for the product with v. Training keeps the casts: a
kernel rounds the gradients of the scores, which the model keeps in float32. A CPU keeps them, too: its half-precision kernels are not
faster.

For bfloat16, a training kernel may compute products in tf32, which has all bits of q, k, v and of the output's gradient. Only weights and
gradients of scores are rounded, to 11 significant bits. The model rounds its weights and their gradients to 8.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_compiler.passes.graph.axes import AxisError
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Match, Operand
from attn_compiler.passes.matching import operands
from attn_compiler.passes.matching.patterns import assembly
from attn_compiler.spec.dtypes import HALVES

NOTE = "q and k are read before the model casts them to float32, which a kernel computes in anyway"


def read_through(mirror: Mirror, match: Match) -> torch.dtype | None:
    """Remove the casts of q and k if the kernel may do without them, and return their half-precision dtype; else None."""
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
        # The axes above the cast can't be followed: the site stays unchanged.
        pass
    match.q, match.k = with_casts
    _settle(match)
    return None


def holds_bfloat16(mirror: Mirror, match: Match) -> bool:
    """True if q and k are bfloat16 numbers cast to float32, and the model's v and weights are bfloat16."""
    if _upcast(match) != torch.bfloat16 or match.scores.factors or _dtype(match.v.root) != torch.bfloat16:
        return False
    try:
        found = [_above_cast(mirror, match, operand) for operand in (match.q, match.k)]
    except AxisError:
        return False
    return all(_dtype(operand.root) == torch.bfloat16 and factor == 1.0 for operand, factor in found)


def _upcast(match: Match) -> torch.dtype | None:
    """Return the half-precision dtype of a site's output and weights, if its scores are float32; None on a CPU."""
    narrow = _dtype(match.out)
    if _is_on_cpu(match.out) or narrow not in HALVES or _dtype(match.first) != torch.float32:
        return None
    return narrow if match.scores.softmax_dtype == "float32" else None


def _settle(match: Match) -> None:
    operands.settle([match.q, match.k, match.v, *match.scores.operands])
    batch_dims = (match.axes.batch, match.axes.heads)
    match.axes = replace(match.axes, **assembly.heads(batch_dims, match.k, match.v, match.scores.sinks))


def _is_on_cpu(node: torch.fx.Node) -> bool:
    return bool(node.meta["val"].device.type == "cpu")


def _above_cast(mirror: Mirror, match: Match, operand: Operand) -> tuple[Operand, float]:
    """Return the operand above its casts, and the constant factor that is skipped in addition. Raises AxisError."""
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
