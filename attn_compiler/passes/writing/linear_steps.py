"""A step of decoding whose new state is written over the old one, as caches do: the kernel writes there itself.

    out, last = linear_call([…, state], text);  state.copy_(last)    becomes    out = step([…], state, text)

The state is written earlier than the model writes it. So nothing may read it in between: it is an input of the graph that the call and
the copy alone use, until the copy, and no other input lies in its memory. Inductor's own way (a copy of the state that is written in place,
and left out later) gave wrong results with two steps one after the other, torch 2.13.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from attn_compiler.passes.graph import mutation
from attn_compiler.spec.linear import LinearForm, LinearSpec


def write_over(node: fx.Node, spec: LinearSpec, op: torch._ops.OpOverload) -> bool:
    """Put a step in the place of a `linear_call` and of the copy of its state, if that is all that the graph does with both states."""
    form = LinearForm.of_text(str(node.args[1]))
    if spec.length != 1 or spec.needs_grad or "state" not in form.roles:
        return False
    operands = list(node.args[0])  # type: ignore[arg-type]
    state = operands.pop(form.roles.index("state"))
    copy = _copy_of(node, state)
    if (
        copy is None
        or state in operands
        or not _can_be_written(state, form)
        or not _is_apart(state)
        or not _is_unread_between(state, node, copy)
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
    """The copy of the new state over the old one, if the new one is used for nothing else."""
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


def _is_apart(state: fx.Node) -> bool:
    """Whether no other input is in the memory of a state."""
    inputs = [
        node.meta.get("example_value") for node in state.graph.nodes if node.op == "placeholder" and node is not state
    ]
    return mutation.storages_of(inputs).isdisjoint(mutation.storages_of(state.meta["example_value"]))


def _is_unread_between(state: fx.Node, node: fx.Node, copy: fx.Node) -> bool:
    """Whether the call and the copy alone use a state, until the copy. A view that was made before may be read after the call."""
    order = {one: place for place, one in enumerate(node.graph.nodes)}
    others = [user for user in state.users if user not in (node, copy)]
    return order[node] < order[copy] and all(order[user] > order[copy] for user in others)
