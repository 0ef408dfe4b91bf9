"""Ops below an attention whose result equals the model's own: they ignore padding, or a fact that is checked at run time says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import views
from attn_compiler.passes.unpad import forms
from attn_compiler.passes.unpad.forms import Context, Form, FormRecipe, Need, places

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTokens:
    """Nodes of bool (B, S). real: no padding. packed: tokens that are computed, which are the real ones and padding that counts."""

    real: fx.Node
    packed: fx.Node


@dataclass(frozen=True, kw_only=True, eq=False)
class RuntimeFact:
    """A condition that has to hold at run time.

    words: for people.
    needs: mirror nodes of tensors that it is asked of, which the model makes without any attention.
    holds: makes the node of a truth value from `needs` and the tokens.
    counts: makes the node of bool (B, S) from `needs`: positions that count, padding or not. If these are packed, too, the fact holds.
    """

    words: str
    needs: tuple[fx.Node, ...]
    holds: Callable[[fx.Graph, Sequence[fx.Node], AskedTokens], fx.Node]
    counts: Callable[[fx.Graph, Sequence[fx.Node], fx.Node], fx.Node] | None = None


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A value equal to the model's own. returned: the recipe for it. fact: the condition that it rests on; None if there is none."""

    returned: FormRecipe
    fact: RuntimeFact | None = None


def exit_at(context: Context, node: fx.Node) -> Exit | None:
    """Return the exit at this op, if it is one."""
    found = EXITS.get(node.target)
    return None if found is None else found(context, node)


def _one_position(context: Context, node: fx.Node) -> Exit | None:
    """Exit at x[:, 0] or x[:, -1]: the first or the last token of each row, which has to be real."""
    x, index = views.source(node), views.argument(node, "index")
    value = context.value(x)
    at = views.named_axes(node, len(value.dims))
    rows, positions = places(value.dims, context.batch), places(value.dims, context.seq)
    length = context.seq.size
    is_last = index == -1 or (length.is_Integer and index == int(length) - 1)
    is_one_row = context.batch is context.seq
    if value.packed is None or at != set(positions) or (rows == positions) != is_one_row or not (index == 0 or is_last):
        return None
    forms.require_alone(context, node, value.dims, (rows[0], positions[0]))
    i, j = rows[0], positions[0]

    def make(maker: Any, given: tuple[fx.Node, ...]) -> fx.Node:
        tokens = given[0] if is_one_row else maker.call(aten.squeeze.dim, given[0], i)
        place = maker.row_ends if is_last else maker.row_starts
        axis = j - (i < j)
        picked = maker.call(aten.index_select.default, tokens, axis, place())
        if is_one_row:
            return maker.call(aten.squeeze.dim, picked, j)  # type: ignore[no-any-return]
        back = i - (j < i)
        made: fx.Node = picked if axis == back else maker.call(aten.movedim.int, picked, axis, back)
        return made

    end = -1 if is_last else 0

    def holds(graph: fx.Graph, _: Sequence[fx.Node], tokens: AskedTokens) -> fx.Node:
        return graph.call_function(torch.all, (graph.call_function(aten.select.int, (tokens.packed, 1, end)),))

    words = f"the {'last' if is_last else 'first'} token of each row is real"
    returned = FormRecipe(needs=(Need(x, "packed"),), make=make)
    return Exit(returned=returned, fact=RuntimeFact(words=words, needs=(), holds=holds))


def _sum(context: Context, node: fx.Node) -> Exit | None:
    """Exit at a sum over all positions of a value that is 0 at padding. Other sums read the model's own value."""
    x = views.source(node)
    value = context.value(x)
    if value.packed is None or value.at_padding != 0:
        return None
    at = set(range(len(value.dims))) if node.target is aten.sum.default else views.named_axes(node, len(value.dims))
    over_all = {*places(value.dims, context.batch), *places(value.dims, context.seq)} <= at
    return Exit(returned=forms.call(node, {x: "packed"})) if over_all else None


def _cross_entropy(context: Context, node: fx.Node) -> Exit | None:
    """Exit at the loss of all positions together, with labels that are ignored at padding."""
    logits, labels = node.args[0], node.args[1]
    if not isinstance(logits, fx.Node) or not isinstance(labels, fx.Node):
        return None
    value, target = context.value(logits), context.value(labels)
    weight, ignored = views.argument(node, "weight"), views.argument(node, "ignore_index")
    if weight is not None or value.packed is None or len(value.dims) != 2 or views.value(labels).dim() != 1:
        return None
    if views.value(labels).is_floating_point() or not target.is_exact:
        return None
    dims = value.dims[:1]
    if not forms.has_both(context, dims) or forms.is_tagged(context, value.dims[1]):
        return None
    # The fact below compares labels with real tokens, which lie row by row.
    forms.require_alone(context, node, dims, (0, 0))

    number: Any = ignored

    def holds(graph: fx.Graph, given: Sequence[fx.Node], tokens: AskedTokens) -> fx.Node:
        is_ignored = graph.call_function(torch.eq, (given[0], number))
        flat = graph.call_method("reshape", (tokens.packed, -1))
        return graph.call_function(torch.all, (graph.call_function(torch.logical_or, (is_ignored, flat)),))

    def counts(graph: fx.Graph, given: Sequence[fx.Node], real: fx.Node) -> fx.Node:
        return graph.call_method("view_as", (graph.call_function(torch.ne, (given[0], number)), real))

    given_as: dict[fx.Node, Form] = {logits: "packed", labels: forms.operand_form(context, node, labels, dims)}
    words = f"labels at padding are {ignored}, which the loss ignores"
    fact = RuntimeFact(words=words, needs=(labels,), holds=holds, counts=counts)
    return Exit(returned=forms.call(node, given_as), fact=fact)


def zero_or_one(mask: fx.Node) -> RuntimeFact:
    """Return the fact that a mask is 0 or 1, on which `mask == 1` and `mask > 0` rest. mask: a mirror node."""

    def holds(graph: fx.Graph, given: Sequence[fx.Node], _: AskedTokens) -> fx.Node:
        either = [graph.call_function(torch.eq, (given[0], number)) for number in (0, 1)]
        return graph.call_function(torch.all, (graph.call_function(torch.logical_or, tuple(either)),))

    return RuntimeFact(words="the mask of padding is 0 or 1", needs=(mask,), holds=holds)


def side_by_side() -> RuntimeFact:
    """Return the fact that windows rest on: distances between tokens are the same without padding."""

    def holds(graph: fx.Graph, _: Sequence[fx.Node], tokens: AskedTokens) -> fx.Node:
        before = graph.call_function(aten.constant_pad_nd.default, (tokens.packed, [1, -1]))
        not_before = graph.call_function(torch.logical_not, (before,))
        starts = graph.call_function(torch.logical_and, (tokens.packed, not_before))
        runs = graph.call_method("sum", (starts, 1))
        return graph.call_function(torch.all, (graph.call_function(torch.le, (runs, 1)),))

    return RuntimeFact(words="the real tokens of each row lie side by side", needs=(), holds=holds)


def _leads(graph: fx.Graph, _: Sequence[fx.Node], tokens: AskedTokens) -> fx.Node:
    """Make the truth value that no computed padding stands behind a real token of its row."""
    seen = graph.call_method("cumsum", (tokens.real, 1))
    is_behind = graph.call_function(torch.gt, (seen, 0))
    is_padding = graph.call_function(
        torch.logical_and, (tokens.packed, graph.call_function(torch.logical_not, (tokens.real,)))
    )
    behind = graph.call_function(torch.logical_and, (is_padding, is_behind))
    return graph.call_function(torch.logical_not, (graph.call_function(torch.any, (behind,)),))


#: the fact that the keys of a row lie together: none of its packed padding is behind them
LEADS = RuntimeFact(words="padding that has a label stands before the real tokens of its row", needs=(), holds=_leads)

EXITS: dict[object, Callable[[Context, fx.Node], Exit | None]] = {
    aten.select.int: _one_position,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.cross_entropy_loss.default: _cross_entropy,
}
