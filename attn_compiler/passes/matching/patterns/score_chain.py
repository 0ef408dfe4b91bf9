"""Sum of the steps between the product and the softmax: one scale, added and masking tensors, a cap, a sink column."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import fx

from attn_compiler.passes.graph import axes, constants, views
from attn_compiler.passes.graph.axes import AxisError, Dim, Dims
from attn_compiler.passes.graph.site import Joining, Limit
from attn_compiler.passes.matching.contraction import Contraction
from attn_compiler.passes.matching.patterns import score_steps, steps
from attn_compiler.passes.matching.patterns.steps import Cast, Step, View
from attn_compiler.spec.scores import Pointwise, ScoreChange, Unusual, pointwise


@dataclass(frozen=True, kw_only=True)
class Joined(Joining):
    """A tensor that joins the scores by a step: added with `weight`, or a bool mask of the scores where it is False (`inverted`: True).

    dims: the dims of the scores where it joins, at the mirror node `used`.
    """

    node: fx.Node
    dims: Dims
    used: fx.Node


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A factor or divisor of the scores known only at run time. dims: dims of the scores there. used: the mirror node that applies it."""

    by: fx.Node
    divide: bool
    dims: Dims
    used: fx.Node


@dataclass(kw_only=True)
class Scores:
    """State of the scores while their steps are followed from the product on: the present dims, and all changes so far.

    changes: in the order of their steps. A later scale is moved before them.
    masked_at: highest values that masked scores may have by now.
    shifted_along: axes whose maximum was subtracted.
    sinks: logits that joined the keys as a column, or the number that all of them equal.
    sinks_first: the column is the first.
    same: nodes that hold the present scores, in any dtype, each with its dims.
    """

    dims: Dims
    scale: float = 1.0
    changes: list[ScoreChange] = field(default_factory=list)
    factors: list[Scaled] = field(default_factory=list)
    additive: list[Joined] = field(default_factory=list)
    keeps: list[Joined] = field(default_factory=list)
    masked_at: list[float] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    shifted_along: list[Dim] = field(default_factory=list)
    is_offset: bool = False
    sinks: Joined | float | None = None
    sinks_first: bool = False
    same: dict[fx.Node, Dims] = field(default_factory=dict)

    @property
    def is_changed(self) -> bool:
        """Return whether an elementwise change was made to the scores."""
        return pointwise(self.changes) is not None

    def unusual(self, what: str) -> None:
        """Note a feature that no lowering supports."""
        self.changes.append(Unusual(what=what))


def follow(product: Contraction, steps: list[Step], dims: Dims) -> Scores:
    """Follow the steps. dims: those of the product. Raises AxisError for steps whose meaning depends on an order that is not kept."""
    scores = Scores(dims=dims, scale=product.alpha, same={product.node: dims})
    if product.addend is not None:
        scores.additive.append(_added(product.addend, dims, product.node, product.beta))
    for step in steps:
        _apply(scores, step)
        if not isinstance(step, (View, Cast)):
            scores.same.clear()
        scores.same[step.node] = scores.dims
    return scores


def softmax_axis(dim: int, scores: Scores) -> Dim:
    """Return the atoms that the softmax runs over. Raises AxisError if an earlier step is valid only for another axis."""
    key = axes.resolve(scores.dims[dim])
    if any(axes.resolve(along) != key for along in scores.shifted_along):
        raise AxisError("the maximum that is subtracted was taken along another axis than the softmax")
    if scores.sinks is not None and axes.resolve(scores.dims[-1]) != key:
        raise AxisError("the sink column lies along another axis than the softmax")
    return key


def _apply(scores: Scores, step: Step) -> None:
    if scores.sinks is not None:
        _check_after_sinks(scores, step)
    match step:
        case steps.View():
            scores.dims = views.forward(step.node, scores.dims)
        case steps.Scale():
            _scale(scores, step, step.factor)
        case steps.RuntimeScale():
            _runtime_scale(scores, step)
        case steps.Add():
            if step.negates:
                _scale(scores, step, -1.0)
            scores.additive.append(_added(step.term, scores.dims, step.node, step.weight))
        case steps.Keep():
            scores.keeps.append(
                Joined(
                    node=step.condition,
                    dims=scores.dims,
                    used=step.node,
                    inverted=step.inverted,
                    fill=step.fill,
                    replaces=True,
                    by_numbers=step.by_numbers,
                )
            )
            scores.masked_at.append(step.fill)
        case steps.Clamp():
            if scores.is_offset:
                scores.unusual("a clamp of scores that a number was added to")
            scores.masked_at.append(step.low)
            scores.limits.append(Limit(low=step.low, high=step.high, of_dtype=step.of_dtype))
        case steps.Offset():
            scores.is_offset = True
        case steps.Shift():
            scores.shifted_along.append(scores.dims[-1])
        case steps.Change():
            _change(scores, step)
        case steps.SinkColumn():
            _join_sinks(scores, step)


def _added(term: fx.Node, dims: Dims, used: fx.Node, weight: float) -> Joined:
    return Joined(node=term, dims=dims, used=used, weight=weight, weighed_in=views.value(used).dtype)


def _check_after_sinks(scores: Scores, step: Step) -> None:
    """Refuse or note steps after the sink column. Kinds describe steps before it joins; later ones would change the column, too."""
    if isinstance(step, (steps.View, steps.SinkColumn)):
        raise AxisError(f"{step.node.name} moves the scores after the sink column joined them")
    if not isinstance(step, (steps.Cast, steps.Clamp, steps.Shift, steps.Offset)):
        name = step.name if isinstance(step, steps.Change) else type(step).__name__.lower()
        scores.unusual(f"{name} after the sink column")


def _join_sinks(scores: Scores, step: steps.SinkColumn) -> None:
    if scores.shifted_along:
        scores.unusual("a sink column beside scores that their maximum was subtracted from")
    if scores.is_offset:
        scores.unusual("a sink column beside scores that a number was added to")
    logits = step.sinks
    scores.sinks = logits if isinstance(logits, float) else Joined(node=logits, dims=scores.dims, used=step.node)
    scores.sinks_first = step.first


def _scale(scores: Scores, step: Step, factor: float) -> None:
    scores.masked_at = [number * factor for number in scores.masked_at]
    if any(number > score_steps.STILL_MASKED_BELOW for number in scores.masked_at):
        raise AxisError(f"{step.node.name} multiplies scores that are masked by now with {factor:g}")
    scores.scale *= factor
    scores.changes = [c.scaled(factor) if isinstance(c, Pointwise) else c for c in scores.changes]
    dtype = views.value(step.node).dtype
    scores.additive = [replace(x, weight=x.weight * factor, weighed_in=dtype) for x in scores.additive]
    scores.keeps = [replace(kept, fill=kept.fill * factor) for kept in scores.keeps]
    scores.limits = [limit.scaled(factor) for limit in scores.limits]


def _runtime_scale(scores: Scores, step: steps.RuntimeScale) -> None:
    scaled = Scaled(by=step.by, divide=step.divide, dims=scores.dims, used=step.node)
    # A kernel multiplies q in its own dtype: a product that fits float32 may be infinite in float16.
    before, after = views.value(step.source).dtype, views.value(step.node).dtype
    if before == torch.float16 and after != before:
        scores.unusual("a run-time scale in a wider dtype than the float16 scores")
    if not (scores.is_changed or scores.additive or scores.masked_at or scores.sinks is not None):
        scores.factors.append(scaled)
        return
    number = constants.fixed(step.by)
    if number:
        _scale(scores, step, 1 / number if step.divide else number)
        return
    scores.factors.append(scaled)
    scores.unusual("a run-time scale after other score changes")


def _change(scores: Scores, step: steps.Change) -> None:
    """Add a change of the scores. A bias inside it, or a second change, has no kind of its own."""
    if scores.additive or scores.keeps or scores.is_changed or scores.shifted_along or scores.is_offset:
        scores.unusual(f"{step.name} after a mask, a bias, a shift or another change")
    scores.changes.append(step.change)
