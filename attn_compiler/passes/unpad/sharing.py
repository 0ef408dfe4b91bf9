"""Rows that begin alike (`options={"share_prefix": True}`): a token is computed once for all rows that agree up to it.

Any row may lead any other up to any position, so prompts of several groups, in any order, and trees of prompts are one case. Nothing
visible changes: an op that mixes positions reads the model's own tensor, of which each element is copied from the token that stands for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import fx

from attn_compiler.passes.graph import axes, gradients, mutation, views
from attn_compiler.passes.graph.calls import reached
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.unpad import forms, rules
from attn_compiler.passes.unpad.analysis import Analysis
from attn_compiler.passes.unpad.forms import FormRecipe, Indexed, KeepsPadding, Kind, Need, Value
from attn_compiler.passes.unpad.making import Maker
from attn_compiler.passes.unpad.masks import PackedPairs, Padding
from attn_compiler.reasons.codes import Code

aten = torch.ops.aten

#: asked at each call: the sums that rows were compared by are equal for equal rows alone; and the kernel's 0 is right
FACTS = ("rows that begin alike were found without an error", "each token sees a key")

_RULE = "rows that begin alike have the same numbers there"


class SharedAnalysis(Analysis):
    """The forms of every value. compared: what tells rows apart is asked of these forms. windows: how far back queries see; None: all."""

    is_shared = True

    def __init__(self, mirror: Mirror, padding: Padding, pairs: Mapping[Site, PackedPairs]) -> None:
        self.windows = tuple(dict.fromkeys(own.band.left for own in pairs.values()))
        self._above = set(reached(site.match.anchor for site in pairs))
        self._stops: dict[fx.Node, KeepsPadding] = {}
        self._asked: set[Need] = set()
        self._tells: dict[Need, frozenset[Need] | None] = {}
        super().__init__(mirror, padding, pairs)
        if self.batch is self.seq:
            raise KeepsPadding(Code.PADDING_MASK, "a batch has more than one row", f"the mask is {self.sizes}")

    def _seen(self, node: fx.Node) -> Value:
        is_drawn = node.op == "call_function" and rules.draws(node)
        if is_drawn and any(self.value(x).kind is Kind.PACKED for x in node.all_input_nodes):
            return Value(kind=Kind.LOST, lost=_drawn(node))
        value = super()._seen(node)
        if is_drawn and value.kind is Kind.ORIGINAL and value.packed is not None:
            return dataclasses.replace(value, packed=FormRecipe(needs=(), make=_refusing(_drawn(node))))
        if value.kind is not Kind.PACKED or value.packed is None:
            return value
        told = [self._told(need) for need in value.packed.needs]
        known = [x for x in told if x is not None]
        if len(known) == len(told) and node in self._above:
            self._asked.update(*known)
        elif len(known) < len(told) or not self._asked.issuperset(set().union(*known)):
            # Rows may differ here, as in their labels. Below the last attention they are not compared for that.
            remedy = "let it read its own token and inputs alone"
            return self._exit(node, forms.refused(node, "it reads what may differ between rows", remedy))
        return value

    def _told(self, need: Need) -> frozenset[Need] | None:
        """Return the forms that tell rows apart in this one; None if it is made of tokens of all positions."""
        value = self.value(need.node)
        if need not in self._tells:
            found: frozenset[Need] | None = frozenset()
            if isinstance(need.form, Indexed) and rows_of(need) is not None:
                found = frozenset((need,)) if value.kind is Kind.ORIGINAL else None
            elif need.form == "packed" and value.kind is Kind.ORIGINAL and value.packed is not None:
                parts = [self._told(x) for x in value.packed.needs]
                found = None if None in parts else frozenset().union(*(x for x in parts if x is not None))
            self._tells[need] = found
        return self._tells[need]

    def _of_kind(self, node: fx.Node, given: list[Value], made: Value) -> Value:
        value = super()._of_kind(node, given, made)
        if value.kind is not Kind.RETURNED:
            return value
        stop = self._stop(node)
        if stop is not None:
            self._stops[node] = stop
        # It may differ between rows, and is not there before the call.
        return Value(kind=Kind.RETURNED, dims=forms.fresh(node), returned=value.returned)

    def _exit(self, node: fx.Node, why: KeepsPadding) -> Value:
        """Let an op read the model's own tensors."""
        value = self._mixed(node, why)
        if value.kind is not Kind.RETURNED:
            return value
        # The first such op above is to blame for all that follows.
        self._stops[node] = self._stop(node) or why
        return Value(kind=Kind.RETURNED, dims=forms.fresh(node), returned=value.returned)

    def _stop(self, node: fx.Node) -> KeepsPadding | None:
        return next((self._stops[x] for x in node.all_input_nodes if x in self._stops), None)

    def _attention(self, node: fx.Node) -> Value:
        pairs = self._pairs.get(node)
        stop = self._stop(node)
        if pairs is not None and stop is not None:
            return Value(kind=Kind.LOST, lost=stop)
        value = super()._attention(node)
        self.facts.pop(node, None)
        if pairs is None or value.packed is None:
            return value
        q, k, v = (need.node for need in value.packed.needs[:3])
        repeated = [_before_repeat(x) for x in (k, v)]
        is_shorter = all(x is not None and self.value(x).packed is not None for x in repeated)
        k, v = (x if x is not None and is_shorter else own for x, own in zip(repeated, (k, v), strict=True))
        is_gqa = is_shorter or bool(views.argument(node, "enable_gqa"))
        scale, window = views.argument(node, "scale"), self.windows.index(pairs.band.left)

        def make(maker: Maker, given: tuple[fx.Node, ...]) -> fx.Node:
            keys, values = (maker.call(aten.index_select.default, x, 2, maker.given.keys) for x in given[1:])
            mask = maker.shared_mask(window)
            attention = torch.nn.functional.scaled_dot_product_attention
            return maker.call(attention, given[0], keys, values, attn_mask=mask, scale=scale, enable_gqa=is_gqa)

        needs = tuple(Need(x, "packed") for x in (q, k, v))
        return Value(kind=Kind.PACKED, dims=value.dims, packed=FormRecipe(needs=needs, make=make))


def check_pairs(pairs: Mapping[Site, PackedPairs]) -> None:
    """Raise KeepsPadding for an attention in which a token's row counts beyond its own prefix, or that adds to its scores."""
    for site, own in pairs.items():
        if not own.band.causal and own.band.right != 0:
            rule, right = "no token sees a later one", own.band.right
            observed = f"it sees {'all' if right is None else right} later ones"
        elif own.scores is not None:
            rule, observed = "nothing is added to the scores of rows that share", "a bias is added"
        else:
            continue
        remedy = 'set options={"unpad": True}, which leaves out padding'
        raise KeepsPadding(Code.PADDING_MASK, rule, observed, at=site.match.out, remedy=remedy)


def compared(made: Mapping[Need, fx.Node], analysis: Analysis) -> list[tuple[fx.Node, int, int | None]]:
    """Return what tells rows apart: values that are taken at tokens, with their axes of rows and of positions. Raises KeepsPadding."""
    found = []
    for need in made:
        at = rows_of(need)
        if at is None:
            continue
        if analysis.value(need.node).kind is not Kind.ORIGINAL:
            observed, remedy = f"{need.node.name} is made of tokens", "make it of the model's inputs alone"
            raise KeepsPadding(Code.PADDING_OUT_OF_REACH, _RULE, observed, at=need.node, remedy=remedy)
        if (dtype := views.value(need.node).dtype).itemsize > 8:
            rule, observed = "rows are compared by numbers of 64 bits", f"{need.node.name} is {dtype}"
            remedy = "pass it as real numbers"
            raise KeepsPadding(Code.PADDING_OUT_OF_REACH, rule, observed, at=need.node, remedy=remedy)
        if gradients.carries(analysis.mirror, need.node):
            # Equal numbers may have been made in different ways, so the gradient of one row is not that of all.
            rule, observed = "what rows are compared by has no gradient", f"{need.node.name} has one"
            remedy = "pass input_ids in place of inputs_embeds"
            raise KeepsPadding(Code.PADDING_OUT_OF_REACH, rule, observed, at=need.node, remedy=remedy)
        found.append((need.node, *at))
    return found


def rows_of(need: Need) -> tuple[int, int | None] | None:
    """Return the axes of rows and positions of a value that is taken at tokens; None if it is the same for all rows."""
    if not isinstance(need.form, Indexed):
        return None
    shape = views.value(need.node).shape
    first = need.form.rank - len(shape)
    rows, positions = need.form.batch - first, need.form.seq - first
    if rows < 0 or axes.size_expr(shape[rows]) == 1:
        return None
    return rows, None if positions < 0 or axes.size_expr(shape[positions]) == 1 else positions


def _refusing(why: KeepsPadding) -> Callable[[Maker, tuple[fx.Node, ...]], fx.Node]:
    def make(maker: Maker, given: tuple[fx.Node, ...]) -> fx.Node:
        raise why

    return make


def _drawn(node: fx.Node) -> KeepsPadding:
    return KeepsPadding(
        Code.PADDING_DRAWN,
        "each row draws its own random numbers",
        f"{node.target} draws them where rows may be alike",
        at=node,
        remedy="set dropout to 0, or call the model in eval mode",
    )


def _before_repeat(x: fx.Node) -> fx.Node | None:
    """Return (B, H, S, D) whose heads are repeated, each beside itself, to make `x`; None if they are not made so."""
    if x.target not in views.RESHAPES or mutation.writes(x):
        return None
    expanded = _unsliced(views.source(x))
    if expanded.target not in views.EXPANDS:
        return None
    single = _unsliced(views.source(expanded))
    if single.target is not aten.unsqueeze.default or views.value(single).dim() != 5 or single.args[1] not in (2, -3):
        return None
    root = views.source(single)
    batch, heads, length, dim = axes.shape_exprs(views.value(root))
    wide = axes.shape_exprs(views.value(expanded))
    is_beside = wide[:2] == (batch, heads) and wide[3:] == (length, dim)
    joined = axes.shape_exprs(views.value(x))
    return root if is_beside and joined == (batch, heads * wide[2], length, dim) else None


def _unsliced(x: fx.Node) -> fx.Node:
    while x.target is aten.slice.Tensor and views.value(x).shape == views.value(views.source(x)).shape:
        x = views.source(x)
    return x
