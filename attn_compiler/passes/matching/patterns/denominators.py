"""Values that a model computes from the scores besides the weights: logsumexps, and sums that divide the exponentials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler.passes.graph import axes, views
from attn_compiler.passes.graph.axes import AxisError, Dim, Dims
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import ReadLse, Refused
from attn_compiler.passes.matching.patterns import shares
from attn_compiler.passes.matching.patterns.score_chain import Scores
from attn_compiler.passes.matching.patterns.shares import QueryNumbers
from attn_compiler.passes.matching.patterns.softmaxes import Softmax
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten
_LOGSUMEXPS = frozenset({aten.logsumexp.default, aten.special_logsumexp.default})


@dataclass(frozen=True, kw_only=True)
class Sums:
    """known: the logsumexps and other sums. nodes: these, and the nodes between the scores and them. lses: the logsumexps."""

    known: Mapping[fx.Node, QueryNumbers]
    nodes: frozenset[fx.Node]
    lses: Mapping[fx.Node, Dims]


def of(mirror: Mirror, softmax: Softmax, scores: Scores, key: Dim) -> Sums:
    """Find the logsumexps of the same scores along the key axis."""
    lses: dict[fx.Node, Dims] = {}
    nodes: set[fx.Node] = set()
    for node, dims in scores.same.items():
        for path in _to_logsumexps(mirror, [node], {*scores.same, *softmax.nodes}):
            found = _summed(path, dims, key)
            if found is not None:
                lses[path[-1]] = found
                nodes |= {*path[1:]}
    return Sums(known={node: shares.of_lse(dims) for node, dims in lses.items()}, nodes=frozenset(nodes), lses=lses)


def _to_logsumexps(mirror: Mirror, path: list[fx.Node], besides: set[fx.Node]) -> Iterable[list[fx.Node]]:
    """Yield paths down to logsumexps, through ops that only move or cast the scores."""
    for user in mirror.readers(path[-1]):
        if user.target in _LOGSUMEXPS:
            yield [*path, user]
        elif user not in besides and user.args[:1] == (path[-1],) and shares.is_passed(user):
            yield from _to_logsumexps(mirror, [*path, user], besides)


def _summed(path: list[fx.Node], dims: Dims, key: Dim) -> Dims | None:
    """Return the dims of a logsumexp over the keys; None if it is over another axis."""
    node = path[-1]
    try:
        dims = shares.moved(path[1:-1], dims)
    except AxisError:
        return None
    given = views.named_axes(node, len(dims))
    if len(given) != 1 or axes.resolve(dims[axis := given.pop()]) != axes.resolve(key):
        return None
    kept: Dims = ((),) if views.argument(node, "keepdim") else ()
    return (*dims[:axis], *kept, *dims[axis + 1 :])


def read(mirror: Mirror, sums: Sums, own: frozenset[fx.Node], out: fx.Node) -> ReadLse | None:
    """Return the logsumexp that is read outside the attention. own: the attention's nodes. Raises Refused if a kernel can't give it."""
    found = [x for x in sums.lses if any(user not in own | sums.nodes for user in mirror.readers(x))]
    if not found:
        return None
    after, own_lse = mirror.dynamo_node(out), mirror.dynamo_node(found[0])
    early = [] if own_lse is None or after is None else _made_before(own_lse, after, {mirror.owner(x) for x in own})
    if len(found) > 1 or own_lse is None or after is None or not _may_wait(mirror, early, found[0], out):
        raise Refused(
            code=Code.OTHER_OUTPUT,
            rule="one logsumexp of the scores is read, and what is made of it can wait for the output",
            observed=f"{found[-1].name} is read{' before ' + out.name + ' is made' if len(found) == 1 else ', too'}",
            at=found[0],
            progress=4,
            remedy="take one logsumexp, and compute the output before what is made of the logsumexp",
        )
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


def check(softmax: Softmax, scores: Scores, *, is_masked_later: bool) -> None:
    """Raise Refused if a kernel's logsumexp differs from the model's.
    A number added to the scores changes it, but not the softmax. is_masked_later: masks of the weights became masks of the scores."""
    observed, remedy = None, None
    if is_masked_later:
        observed, remedy = "weights are masked after it was taken", "mask the scores before softmax and logsumexp"
    elif scores.is_offset or scores.shifted_along:
        observed, remedy = (
            "a number is added to the scores first",
            "add the number to the logsumexp, and not to the scores",
        )
    elif scores.sinks is not None:
        observed, remedy = "a column of sinks joined them first", "take the logsumexp of the scores without the column"
    if observed is not None:
        rule = "the logsumexp that is read is that of the scores as the softmax has them"
        raise Refused(code=Code.SCORES_READ, rule=rule, observed=observed, at=softmax.node, progress=4, remedy=remedy)
