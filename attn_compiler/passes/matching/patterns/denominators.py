"""Values that a model computes from the scores besides the weights: logsumexps, and sums that divide the exponentials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from attn_compiler.passes.graph import axes, gradients, views
from attn_compiler.passes.graph.axes import Dim, Dims
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import ReadLse, Refused
from attn_compiler.passes.matching.patterns import paths, score_steps, shares, softmaxes
from attn_compiler.passes.matching.patterns.score_chain import Scores
from attn_compiler.passes.matching.patterns.shares import ONE, Number, QueryNumbers, X
from attn_compiler.passes.matching.patterns.softmaxes import Softmax
from attn_compiler.passes.matching.patterns.steps import Cast, Shift, Step
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten
_LOGSUMEXPS = frozenset({aten.logsumexp.default, aten.special_logsumexp.default})


@dataclass(frozen=True, kw_only=True)
class Sums:
    """known: logsumexps, sums of exponentials, and the rows' maximum. nodes: those between the scores and a logsumexp, with both ends.

    lses: logsumexps of the scores, however they are computed. of_weights: the sum of the weights. above: a number that is at least 1.
    others: between the scores and the logsumexps of other numbers, which the scores plus a number have.
    """

    known: Mapping[fx.Node, QueryNumbers]
    nodes: frozenset[fx.Node]
    lses: Mapping[fx.Node, Dims]
    of_weights: Number
    above: Number | None
    others: frozenset[fx.Node]


def of(mirror: Mirror, softmax: Softmax, scores: Scores, steps: list[Step], key: Dim) -> Sums:
    """Find what the model computes of the same scores along the key axis."""
    less, known, is_maximum = _subtracted(mirror, scores, steps)
    given = QueryNumbers(of=(X / less,), dims=())
    nodes: set[fx.Node] = set()
    passed: set[fx.Node] = set()
    for node, dims in scores.same.items():
        for path in paths.paths_to(mirror, [node], _LOGSUMEXPS):
            found = paths.along(path, dims)
            if found is not None and found[0] == axes.resolve(key):
                known[path[-1]] = replace(given, dims=found[1], power=1.0)
                passed |= {*path[1:]}
    for path in () if softmax.is_divided else paths.paths_to(mirror, [softmax.node], {softmaxes.SUM}):
        found = paths.along(path, scores.dims)
        if found is not None and found[0] == axes.resolve(key):
            known[path[-1]] = replace(given, dims=found[1])
    above = given.of[0] if is_maximum else None
    reading = shares.Reading(mirror, known, above)
    lses: dict[fx.Node, Dims] = {}
    for node, value in reading.values():
        if value.of == (X,) and value.power == 1.0 and not paths.is_passed(node):
            lses[node] = value.dims
            nodes |= {x for x in reached([node]) if x in reading.nodes | passed}
    of_weights = ONE if softmax.is_divided else given.of[0]
    return Sums(
        known=known,
        nodes=frozenset(nodes),
        lses=lses,
        of_weights=of_weights,
        above=above,
        others=frozenset(passed - nodes),
    )


def _subtracted(mirror: Mirror, scores: Scores, steps: list[Step]) -> tuple[Number, dict[fx.Node, QueryNumbers], bool]:
    """Return (exp of the number that was subtracted from each row's scores, known values that it is made of, whether it is the maximum)."""
    last = next((step for step in reversed(steps) if not isinstance(step, Cast)), None)
    if not scores.shifted_along and not scores.is_offset:
        return ONE, {}, False
    unknown = sympy.Symbol("exp of what was subtracted", positive=True)
    if not isinstance(last, Shift) or len(scores.shifted_along) > 1 or scores.is_offset:
        return unknown, {}, False
    # Of the maximum with its gradient and the one without only that which was subtracted is known.
    path = [node for node in reversed(last.uses) if node.target not in score_steps.MAXIMA]
    start = max(
        (i for i, node in enumerate(path) if node.target is aten.detach.default or not views.is_view(node)), default=0
    )
    whole: Dims = (*scores.dims[:-1], ())
    dims = whole if views.value(path[start]).dim() == len(whole) else whole[:-1]
    known = {path[start]: QueryNumbers(of=(unknown,), dims=dims, power=1.0)}
    less = shares.Reading(mirror, known).value(last.subtracted)
    return (unknown, {}, False) if less is None else (less.of[0], known, not last.is_above)


def read(mirror: Mirror, sums: Sums, own: frozenset[fx.Node], out: fx.Node) -> ReadLse | None:
    """Return the logsumexp that is read outside the attention. own: the attention's nodes. Raises Refused if a kernel can't give it."""
    found = [x for x in sums.lses if any(user not in own | sums.nodes for user in mirror.readers(x))]
    if not found:
        return None
    after, own_lse = mirror.dynamo_node(out), mirror.dynamo_node(found[0])
    early = [] if own_lse is None or after is None else _made_before(own_lse, after, {mirror.owner(x) for x in own})
    if len(found) > 1 or own_lse is None or after is None or not _may_wait(mirror, early, found[0], out):
        rule = "one logsumexp of the scores is read, and what is made of it can wait for the output"
        observed = f"{found[-1].name} is read{' before ' + out.name + ' is made' if len(found) == 1 else ', too'}"
        remedy = "take one logsumexp, and compute the output before what is made of the logsumexp"
        raise Refused(Code.OTHER_OUTPUT, rule, observed, at=found[0], progress=4, remedy=remedy)
    return ReadLse(node=found[0], dims=sums.lses[found[0]])


def _made_before(lse: fx.Node, out: fx.Node, besides: set[fx.Node | None]) -> list[fx.Node]:
    """Return the nodes computed from `lse` before `out`, in order."""
    found: set[fx.Node] = {lse}
    made: list[fx.Node] = []
    node = lse.next if lse < out else out
    while node is not out:
        if node not in besides and found & set(node.all_input_nodes):
            found.add(node)
            made.append(node)
        node = node.next
    return made


def _may_wait(mirror: Mirror, early: list[fx.Node], lse: fx.Node, out: fx.Node) -> bool:
    """Return whether nodes computed from a logsumexp before the output may run after it.
    No node there may write, draw random numbers or change a mode, and the output may not depend on them."""
    first, last = mirror.order(lse), mirror.order(out)
    after = mirror.dynamo_node(out)
    if not early or after is None:
        return after is not None
    if set(early) & set(after.all_input_nodes):
        return False
    between = [node for node in early[0].graph.nodes if early[0] < node < after]
    if any(node.op.startswith("call") and node.meta.get("example_value") is None for node in between):
        return False
    if any(first < mirror.order(writer) < last for writer, _ in mirror.writers):
        return False
    return all(mirror.computes_only(node) and not any(map(_draws, mirror.owned(node))) for node in early)


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def check(softmax: Softmax, scores: Scores, *, is_masked_later: bool, is_of_others: bool) -> None:
    """Raise Refused if a kernel's logsumexp differs from the model's.

    A number added to the scores changes it, but not the softmax. is_masked_later: masks of the weights became masks of the scores.
    is_of_others: another logsumexp is read.
    """
    observed, remedy = None, None
    if is_masked_later:
        observed, remedy = "weights are masked after it was taken", "mask the scores before softmax and logsumexp"
    elif is_of_others:
        observed, remedy = (
            "a number is added to the scores first",
            "add the number to the logsumexp, and not to the scores",
        )
    elif scores.sinks is not None:
        observed, remedy = "a column of sinks joined them first", "take the logsumexp of the scores without the column"
    if observed is not None:
        rule = "the logsumexp that is read is that of the scores as the softmax has them"
        raise Refused(Code.SCORES_READ, rule, observed, at=softmax.node, progress=4, remedy=remedy)


def check_maximum(mirror: Mirror, steps: list[Step]) -> None:
    """Refuse a subtracted maximum over scores and a learned tensor that no sum takes in: its gradient is zeros, and may be asked for."""
    for step in steps:
        for maximum in (x for x in step.uses if x.target in score_steps.MAXIMA):
            learned = [x for x in maximum.all_input_nodes if x not in step.uses and gradients.carries(mirror, x)]
            if learned:
                rule = "what a row's maximum is taken over is read by the sum, too, or wants no gradient"
                observed = f"{maximum.name} reads {learned[0].name}, whose gradient is zeros"
                remedy = "detach it, or leave it out of the maximum"
                raise Refused(Code.WRITTEN_BY_HAND, rule, observed, at=maximum, progress=4, remedy=remedy)
