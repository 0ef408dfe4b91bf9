"""Which ops draw random numbers, by PyTorch's tags; and that each number is drawn once, for real tokens or for all positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from attn_compiler.passes.graph import views
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.passes.unpad.values import Need
from attn_compiler.reasons.codes import Code

if TYPE_CHECKING:
    from attn_compiler.passes.unpad.making import Maker

ONCE = "random numbers are drawn once"
REMEDY = "call the model in eval mode, or do not read in training what is drawn (output_hidden_states=False)"

#: arguments by which an op is told to draw nothing: `F.dropout(x, 0.1, training=False)`
_SWITCHES = ("train", "training", "dropout_p", "p")


def draws(node: fx.Node) -> bool:
    """Whether a mirror node draws random numbers, with the arguments that it has."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = {argument.name for argument in node.target._schema.arguments}
    return not any(name in names and views.argument(node, name) in (False, 0) for name in _SWITCHES)


def is_drawn(maker: Maker) -> bool:
    """Whether random numbers are drawn for tokens: others than the model's, by the same law."""
    return any(_runs(maker, need) for need in maker.made)


def check_once(maker: Maker) -> None:
    """What is random may not be drawn for real tokens, and again for what the model reads of all positions. Raises KeepsPadding."""
    for need in maker.made:
        node = need.node
        if not _runs(maker, need):
            continue
        is_gone = maker.mirror.owner(node) in maker.erased
        is_read_twice = need.form == "packed" and Need(node, "plain") in maker.made
        if is_read_twice or not is_gone:
            raise KeepsPadding(Code.PADDING_DRAWN, ONCE, f"{node.name} is read at padding, too", at=node, remedy=REMEDY)


def _runs(maker: Maker, need: Need) -> bool:
    """Whether this form of an op that draws is made by running it, and not out of what the model's own call gave."""
    if not draws(need.node):
        return False
    packed = maker.analysis.value(need.node).packed
    if need.form == "packed" and packed is not None:
        return all(read.node is not need.node for read in packed.needs)
    return need.form == "plain" and maker.mirror.dynamo_node(need.node) is None
