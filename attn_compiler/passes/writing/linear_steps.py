"""A decoding step whose new state overwrites the old one, as in caches: the kernel writes there itself.

    out, last = linear_call([…, state], text);  state.copy_(last)    becomes    out = step([…], state, text)

The state is written earlier than the model writes it. So nothing may read it in between: it is an input of the graph that only the call
and the copy use, until the copy, and no other input lies in its memory. Inductor's own way (a copy of the state that is written in place,
and removed later) gave wrong results with two steps one after the other, torch 2.13.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Set
from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import mutation
from attn_compiler.spec.linear import LinearForm, LinearSpec


def shared_memory(graph: fx.Graph) -> Set[Any]:
    """Return the storages that several inputs of a graph lie in."""
    each = (mutation.storages_of(node.meta.get("example_value")) for node in graph.find_nodes(op="placeholder"))
    counts = Counter(storage for storages in each for storage in storages)
    return {storage for storage, count in counts.items() if count > 1}


def write_over(node: fx.Node, spec: LinearSpec, op: torch._ops.OpOverload, shared: Set[Any]) -> bool:
    """Replace a `linear_call` and the copy of its state by a step, if the graph does nothing else with both states.

    shared: `shared_memory` of the graph.
    """
    form = LinearForm.from_text(str(node.args[1]))
    if spec.length != 1 or spec.needs_grad or "state" not in form.roles:
        return False
    operands = list(node.args[0])  # type: ignore[arg-type]
    state = operands.pop(form.roles.index("state"))
    copy = _copy_of(node, state)
    if (
        copy is None
        or state in operands
        or not _can_be_written(state, form)
        or not shared.isdisjoint(mutation.storages_of(state.meta["example_value"]))
        # Only the call and the copy use the state, until the copy. A view that was made before may be read after the call.
        or not (node < copy and all(copy < user for user in state.users if user not in (node, copy)))
    ):
        return False
    with node.graph.inserting_before(node):
        out = node.graph.call_function(op, (operands, state, node.args[1]))
    out.meta = {**node.meta, "example_value": node.meta["example_value"][0]}
    for user in [user for user in node.users if user.args[1] == 0]:
        user.replace_all_uses_with(out)
        node.graph.erase_node(user)
    copy.replace_all_uses_with(state)
    for erased in (copy, copy.args[1], node):
        node.graph.erase_node(erased)  # type: ignore[arg-type]
    return True


def _copy_of(node: fx.Node, state: fx.Node) -> fx.Node | None:
    """Return the copy of the new state over the old one, if the new one is used for nothing else."""
    if not all(user.target is operator.getitem for user in node.users):
        return None
    lasts = [user for user in node.users if user.args[1] == 1]
    if len(lasts) != 1 or len(lasts[0].users) != 1:
        return None
    (copy,) = lasts[0].users
    is_copy = copy.op == "call_method" and copy.target == "copy_"
    return copy if is_copy and copy.args == (state, lasts[0]) and not copy.kwargs else None


def _can_be_written(state: fx.Node, form: LinearForm) -> bool:
    value = state.meta.get("example_value")
    return (
        state.op == "placeholder"
        and isinstance(value, torch.Tensor)
        and value.dtype == getattr(torch, form.state_dtype)
        and value.is_contiguous()
        and not value.requires_grad
    )
