"""Names of tensors in formulas: the user's own name where there is one."""

from __future__ import annotations

import operator
import re

import torch
from torch import fx

from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.torch_private import frames as torch_frames

#: Dynamo's name of an argument of the model: l_kwargs_attention_mask_
_ARGUMENT = re.compile(r"^l_(?:kwargs_|self_)?(\w+?)_*$")
#: the most nodes that are searched for a tensor's inputs: a mask has few, hidden states have all nodes before them
_MOST = 64


def name_of(mirror: Mirror, node: fx.Node) -> str:
    """Return the name of the node in Dynamo's graph, or in the mirror if Dynamo has none."""
    dynamo = mirror.dynamo_node(node)
    return dynamo.name if dynamo is not None else node.name


def users_name(mirror: Mirror, node: fx.Node) -> str:
    """Return the model's name of an input, "attention_mask", however it was passed on. For a mask or integers made of one
    input alone, return that input and the last op: "attention_mask.flip". Else return the same as `name_of`."""
    dynamo = mirror.dynamo_node(node)
    return node.name if dynamo is None else name_in_dynamo(dynamo, node.meta["val"].dtype)


def name_in_dynamo(dynamo: fx.Node, dtype: torch.dtype) -> str:
    """Return `users_name` for a node of Dynamo's graph whose value has that dtype."""
    if dynamo.op == "placeholder":
        return _input(dynamo)
    # The inputs of a float (a position, a part of a hidden state) say nothing about it. The input of a mask does.
    only = None if dtype.is_floating_point else _only_input(dynamo)
    return dynamo.name if only is None else f"{_input(only)}.{_op(dynamo)}"


def _op(node: fx.Node) -> str:
    """Return the name of a node's method or function. The node itself may have the name of a model's variable."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)


def _input(placeholder: fx.Node) -> str:
    return torch_frames.key_of(placeholder) or _ARGUMENT.sub(r"\1", placeholder.name)


def _only_input(node: fx.Node) -> fx.Node | None:
    """Return the one input tensor that a node is computed from; None if there are more, or if a module owns it."""
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
    """True if a user of a tensor may write to it."""
    if node.target is operator.setitem:
        return True
    return node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
