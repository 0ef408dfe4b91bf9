"""Ops that draw random numbers, by PyTorch's tags. Each number is drawn once, for real tokens or for all positions."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from attn_compiler.passes.graph import views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.unpad.forms import Context
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.passes.unpad.values import Need
from attn_compiler.reasons.codes import Code

ONCE = "random numbers are drawn once"
REMEDY = "call the model in eval mode, or do not read in training what is drawn (output_hidden_states=False)"

#: arguments by which an op is told to draw nothing: `F.dropout(x, 0.1, training=False)`
_SWITCHES = ("train", "training", "dropout_p", "p")


def draws(node: fx.Node) -> bool:
    """Return whether a mirror node draws random numbers, with the arguments that it has."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = {argument.name for argument in node.target._schema.arguments}
    return not any(name in names and views.argument(node, name) in (False, 0) for name in _SWITCHES)


def is_drawn(made: Iterable[Need], context: Context, mirror: Mirror) -> bool:
    """Return whether random numbers are drawn for tokens: other numbers than the model's, from the same distribution."""
    return any(_runs(need, context, mirror) for need in made)


def check_once(made: Collection[Need], context: Context, mirror: Mirror, erased: Collection[fx.Node]) -> None:
    """Raise KeepsPadding if numbers are drawn for real tokens, and again because the model reads all positions.

    made: the forms that were made. erased: nodes of the model's own that are gone.
    """
    for need in made:
        node = need.node
        if not _runs(need, context, mirror):
            continue
        is_gone = mirror.owner(node) in erased
        is_read_twice = need.form == "packed" and Need(node, "plain") in made
        if is_read_twice or not is_gone:
            raise KeepsPadding(Code.PADDING_DRAWN, ONCE, f"{node.name} is read at padding, too", at=node, remedy=REMEDY)


def _runs(need: Need, context: Context, mirror: Mirror) -> bool:
    """Return whether this form of an op that draws is made by running the op, and not from the result of the model's own call."""
    if not draws(need.node):
        return False
    packed = context.value(need.node).packed
    if need.form == "packed" and packed is not None:
        return all(read.node is not need.node for read in packed.needs)
    return need.form == "plain" and mirror.dynamo_node(need.node) is None
