"""What a tensor is called in a formula: by the user's own name where there is one."""

from __future__ import annotations

import operator
import re

import torch
from torch import fx

from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.torch_private import frames as torch_frames

#: how Dynamo names what the model was called with: l_kwargs_attention_mask_
_ARGUMENT = re.compile(r"^l_(?:kwargs_|self_)?(\w+?)_*$")
#: nodes that are looked at for what a tensor is made of: a mask is made of few, and hidden states of all before them
_MOST = 64


def name_of(mirror: Mirror, node: fx.Node) -> str:
    """That of the node in Dynamo's graph, or in the mirror where Dynamo has none."""
    dynamo = mirror.dynamo_node(node)
    return dynamo.name if dynamo is not None else node.name


def users_name(mirror: Mirror, node: fx.Node) -> str:
    """As the model's code calls an input: "attention_mask", by whatever way it was handed on. Of a mask, or of whole
    numbers, that is made of one input alone, that one and the last op: "attention_mask.flip". Else as `name_of`."""
    dynamo = mirror.dynamo_node(node)
    return node.name if dynamo is None else name_in_dynamo(dynamo, node.meta["val"].dtype)


def name_in_dynamo(dynamo: fx.Node, dtype: torch.dtype) -> str:
    """As `users_name`, of a node of Dynamo's graph whose value has that dtype."""
    if dynamo.op == "placeholder":
        return _input(dynamo)
    # A position's number, or a part of a hidden state, says nothing by what it is made of. A mask does.
    only = None if dtype.is_floating_point else _only_input(dynamo)
    return dynamo.name if only is None else f"{_input(only)}.{_op(dynamo)}"


def _op(node: fx.Node) -> str:
    """A method or a function by its own name: nodes are named after the model's variables, too."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)


def _input(placeholder: fx.Node) -> str:
    return torch_frames.key_of(placeholder) or _ARGUMENT.sub(r"\1", placeholder.name)


def _only_input(node: fx.Node) -> fx.Node | None:
    """The one tensor that a node is made of, if it is made of one, and no module's own."""
    found: fx.Node | None = None
    seen, waiting = {node}, [node]
    while waiting:
        now = waiting.pop()
        for part in (*now.all_input_nodes, *filter(_writes, now.users)):
            if part in seen:
                continue
            seen.add(part)
            if part.op == "placeholder" and isinstance(part.meta.get("example_value"), torch.Tensor):
                if found is not None or torch_frames.is_of_module(part):
                    return None
                found = part
            elif part.op not in ("placeholder", "get_attr"):
                waiting.append(part)
            if len(seen) > _MOST:
                return None
    return found


def _writes(node: fx.Node) -> bool:
    """Whether a user of a tensor may write to it."""
    if node.target is operator.setitem:
        return True
    return node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
