"""Conditions behind added tensors that only mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.passes.graph import constants, mutation, views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.matching.patterns.score_steps import MASKED_BELOW, STILL_MASKED_BELOW, rounded

aten = torch.ops.aten

#: views that leave a tensor aligned with the scores from the right
_KEEP_ALIGNMENT = frozenset(
    {
        *views.EXPANDS,
        *views.COPIES,
        aten.slice.Tensor,
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
    }
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An added tensor: 0 where a condition holds (or, inverted, does not), else `fill`. `node`: the op that reads it."""

    condition: fx.Node
    inverted: bool
    fill: float
    node: fx.Node


def condition_of_mask(mirror: Mirror, term: fx.Node, weight: float) -> Choice | None:
    """Return the condition of an added tensor that is 0 where it holds and masks elsewhere. The fill is multiplied by `weight`.

    None for any other tensor, and for one that is written to later.

    Adding such a tensor and masking by its condition differ only in rows without any allowed key: 0 here, the mean of v there. Kernels are
    slower with float32's lowest number than with -inf.
    """
    path = [term]
    while views.is_view(path[-1]) and path[-1].target in _KEEP_ALIGNMENT:
        path.append(views.source(path[-1]))
    top = path[-1]
    if any(mutation.is_written_later(mirror, node) for node in path):
        return None
    if top.target not in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar):
        return None
    condition = top.args[0]
    yes, no = (constants.number(mirror, x) for x in top.args[1:3])
    if not isinstance(condition, fx.Node) or yes is None or no is None:
        return None
    yes, no = (rounded(number, *reversed(path)) for number in (yes, no))
    if yes == 0 and no <= MASKED_BELOW and no * weight <= STILL_MASKED_BELOW:
        return Choice(condition=condition, inverted=False, fill=no * weight, node=top)
    if no == 0 and yes <= MASKED_BELOW and yes * weight <= STILL_MASKED_BELOW:
        return Choice(condition=condition, inverted=True, fill=yes * weight, node=top)
    return None
