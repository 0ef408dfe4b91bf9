"""Additions to the scores of packed tokens: the same expression, of places among real tokens instead of positions.

An addition can be expressed so if it depends only on the distance of query and key, or on numbers of the key's token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, on_nodes
from attn_compiler.index_expr.changing import throughout
from attn_compiler.index_expr.on_nodes import Names, NodeMaker
from attn_compiler.passes.graph import axes, gradients, views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.unpad.forms import Form, Indexed, KeepsPadding, Need
from attn_compiler.reasons.codes import Code
from attn_compiler.spec import added_scores
from attn_compiler.spec.added_scores import Alibi, ProvedScore, RelativeBias
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import DenseBias

aten = torch.ops.aten

B, Q, K = map(Index, "bqk")

#: a tensor of (rows, positions), at the real tokens
_OF_TOKENS = Indexed(batch=0, seq=1, rank=2)

_RULE = "what joins the scores goes by the distance of query and key, or by numbers of the key's token"
_REMEDY = "there is nothing to do: packed tokens take T5's relative biases and ALiBi alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedScores:
    """The addition to the score of a head, a query and a key.

    value: over h, and over q and k, which are places among the real tokens of all rows.
    tensors: the forms that the loads of `value` read, by name. `value` reads a tensor of tokens at the place of the key.
    counts_positions: distances count, so the real tokens of each row have to lie side by side.
    """

    value: Expr
    tensors: Mapping[str, Need]
    counts_positions: bool

    @property
    def key(self) -> tuple[Expr, tuple[tuple[str, Need], ...]]:
        """Return a key that is equal for sites with the same addition."""
        return self.value, tuple(sorted(self.tensors.items(), key=lambda item: item[0]))

    def emit(
        self, maker: NodeMaker, tensors: Mapping[str, fx.Node], *, like: fx.Node, queries: fx.Node, keys: fx.Node
    ) -> fx.Node:
        """Emit the numbers, (1, H, T, T), in the dtype of `like`, which is q of (1, H, T, D).

        tensors: the forms of `self.tensors`. queries: int64 (T, 1), the places of queries. keys: int64 (1, T).
        """
        value = maker.value(like)
        heads = value.shape[1]
        of_heads = maker.call(torch.arange, heads, device=value.device)
        of_heads = maker.call(torch.Tensor.view, of_heads, heads, 1, 1)
        # The numbers of tokens are (1, T).
        read = {
            name: maker.call(aten.select.int, node, 0, 0) if self.tensors[name].form == _OF_TOKENS else node
            for name, node in tensors.items()
        }
        names = Names(
            device=value.device,
            indices={"h": of_heads, "q": queries, "k": keys},
            tensors=read,
            within={"h": Linear((), heads - 1)} if isinstance(heads, int) else {},
        )
        added = on_nodes.emit(maker, self.value, names, real=torch.float32)
        return maker.call(torch.Tensor.to, maker.call(aten.unsqueeze.default, added, 0), value.dtype)


def packed_scores(site: Site, spec: AttentionSpec) -> PackedScores | None:
    """Return a site's addition to its scores; None for nothing. Raises KeepsPadding if packed tokens can't express it."""
    score = spec.score
    beyond = [change for change in score.changes if not isinstance(change, DenseBias)]
    is_proved = bool(score.proved) or not score.changes
    if beyond or not is_proved or score.runtime_scale:
        raise _refused(site, f"the scores are changed: {score.words}")
    if not score.proved:
        return None
    found = [_packed(site, kind) for kind in score.proved]
    value: Expr = Const(0.0)
    for one in found:
        value = ix.add(value, one.value)
    tensors = {name: need for one in found for name, need in one.tensors.items()}
    return PackedScores(value=value, tensors=tensors, counts_positions=any(one.counts_positions for one in found))


def _refused(site: Site, observed: str) -> KeepsPadding:
    return KeepsPadding(Code.PADDING_MASK, _RULE, observed, at=site.match.out, remedy=_REMEDY)


def check_scores(site: Site, scores: PackedScores, mirror: Mirror, mask: fx.Node) -> None:
    """Raise KeepsPadding unless the addition can be written anew in this graph. mask: the padding, (B, S)."""
    own = axes.shape_exprs(views.value(mask))
    for name, need in scores.tensors.items():
        shape = axes.shape_exprs(views.value(need.node))
        # One flat index serves the tensor and the mask.
        if need.form == _OF_TOKENS and shape != own:
            rule = "numbers of the key's token are (rows, positions), as the mask is"
            observed = f"{name} are {tuple(shape)}, and the mask is {tuple(own)}"
            remedy = "make the tensor that is added as large as attention_mask"
            raise KeepsPadding(Code.PADDING_MASK, rule, observed, at=site.match.out, remedy=remedy)
    _check_gradient(site, mirror)


def _check_gradient(site: Site, mirror: Mirror) -> None:
    """Raise KeepsPadding if the model stops the gradient of an addition: one written anew passes it to all that it reads."""
    if gradients.carries(mirror, site.match.out) is False:
        return
    read = {version.node for version in site.score_loads.values()}
    between: set[fx.Node] = set()
    added = views.argument(site.match.anchor, "attn_mask")
    waiting = [added] if isinstance(added, fx.Node) else []
    while waiting:
        node = waiting.pop()
        if node not in between and node not in read:
            between.add(node)
            waiting.extend(node.all_input_nodes)
    stopped = gradients.stopped_at(mirror, between)
    if stopped is not None:
        rule = "what joins the scores passes its gradient on to all that it is made of"
        observed = f"the gradient stops at {stopped.name}"
        remedy = "set requires_grad to False for parameters that are not learned"
        raise KeepsPadding(Code.PADDING_MASK, rule, observed, at=site.match.out, remedy=remedy)


def _packed(site: Site, kind: ProvedScore) -> PackedScores:
    match kind:
        case RelativeBias(at=at):
            if any(i.facts.has_loads or ix.sizes(i) for i in at):
                raise _refused(site, f"the distance is known at run time only: {kind.words}")
            return _with_tensors(site, kind, kind.summand, counts_positions=True)
        case Alibi(slopes=slopes, position=position):
            by_distance = _by_distance(position)
            if by_distance is not None:
                value = added_scores.Alibi(slopes=slopes, position=by_distance).summand
                return _with_tensors(site, kind, value, counts_positions=True)
            # Places of keys count only in loads of (row, key), and besides them only numbers.
            others = throughout(position, lambda x: ix.ZERO if isinstance(x, Load) and x.at == (B, K) else x)
            if not others.facts.has_loads and not ix.mentions(others, B, Q, K):
                return _with_tensors(site, kind, kind.summand, counts_positions=False)
    raise _refused(site, f"the scores are changed: {kind.words}")


def _by_distance(position: Expr) -> Expr | None:
    """Return the position as a number of k - q alone, up to a number that is equal for all keys of a query: no softmax sees that."""
    form = ix.linear(position)
    of_key = [(term, factor) for term, factor in form.terms if ix.mentions(term, K)]
    if len(of_key) != 1:
        return None
    term, factor = of_key[0]
    distance, back = Linear(((K, 1), (Q, -1))), Linear(((K, -1), (Q, 1)))
    if term == K:
        return ix.mul(ix.add(distance, ix.ZERO), Const(factor))
    if isinstance(term, Apply) and term.op == "abs" and ix.linear(term.args[0]) in (distance, back):
        return ix.mul(ix.apply("abs", ix.add(distance, ix.ZERO)), Const(factor))
    return None


def _with_tensors(site: Site, kind: ProvedScore, value: Expr, *, counts_positions: bool) -> PackedScores:
    tensors: dict[str, Need] = {}

    def of_tokens(x: Expr) -> Expr:
        if not isinstance(x, Load):
            return x
        is_of_tokens = x.at == (B, K)
        form: Form = _OF_TOKENS if is_of_tokens else "plain"
        version = site.score_loads[x.tensor]
        if version.since is not None or version.until is not None:
            raise _refused(site, f"{x.tensor} is written in place")
        name = f"{x.tensor} of tokens" if is_of_tokens else x.tensor
        tensors[name] = Need(version.node, form)
        return Load(name, (K,), x.kind) if is_of_tokens else x

    value = throughout(value, of_tokens)
    if ix.mentions(value, B) or ix.sizes(value):
        raise _refused(site, f"the scores are changed: {kind.words}")
    return PackedScores(value=value, tensors=tensors, counts_positions=counts_positions)
