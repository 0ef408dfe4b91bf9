"""Check of a function's ops: a run at random numbers proves the result only if every op is on the list.

Ops on the list build the result from sums, products, exponentials and roots of the operands. The result is then one expression everywhere,
and two such functions that agree at random points are equal. An op that selects by value would break that. So no value made from an operand
may be clamped to limits other than the form's. None may become an integer or a bool either, which could be an index or a mask. Nothing is
written to an operand, drawn at random, or read before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from attn_compiler.spec.linear import LinearForm
from attn_compiler.torch_private import substitution

_ARITHMETIC = (
    "add sub rsub mul div neg exp cumsum sum rsqrt sqrt pow reciprocal mm bmm matmul addmm baddbmm einsum linalg_solve_triangular "
    "softplus"
)
MOVES = (
    "_to_copy clone view _unsafe_view reshape _reshape_alias expand permute transpose t unsqueeze squeeze select slice split cat stack "
    "constant_pad_nd alias detach repeat_interleave index_select unbind mT copy_ contiguous"
)
_MAKES = "zeros ones zeros_like ones_like eye new_zeros new_ones full scalar_tensor lift_fresh_copy arange triu tril"
_CHOOSES = "masked_fill bitwise_not logical_not"
ALLOWED = frozenset(" ".join((_ARITHMETIC, MOVES, _MAKES, _CHOOSES, "clamp getitem")).split())
_VIEWS = frozenset(
    "view expand permute transpose t unsqueeze squeeze select slice split alias detach _reshape_alias getitem unbind mT".split()
)


def why_not(run: Callable[..., tuple[Tensor, Tensor]], operands: Sequence[Tensor], form: LinearForm) -> str | None:
    """Return the op of a function about which a test proves nothing; None if all ops are on the list."""
    graph = substitution.traced(lambda *given: run(form, given), operands)
    data: set[fx.Node] = set(graph.find_nodes(op="placeholder"))
    inputs, memory = frozenset(data), {node: node for node in data}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = _name(node)
        of_data = any(x in data for x in node.all_input_nodes)
        why = _refused(node, name, of_data, form)
        if why is not None:
            return why
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        base = node if first is None else memory.get(first, first)
        if _writes(node):
            if base in inputs:
                return f"{name} writes to an operand"
            if of_data:
                data |= {node, base, *(other for other, own in memory.items() if own is base)}
        if of_data:
            data.add(node)
        memory[node] = base if first is not None and (name in _VIEWS or _writes(node)) else node
        # A view of a tensor with data has data, too.
        if memory[node] in data:
            data.add(node)
    return None


def _refused(node: fx.Node, name: str, of_data: bool, form: LinearForm) -> str | None:
    if name not in ALLOWED:
        return f"{name} is none of the ops that the recurrence is made of"
    made = node.meta.get("val")
    if of_data and isinstance(made, Tensor) and not made.is_floating_point():
        return f"{name} makes {str(made.dtype).removeprefix('torch.')} of what comes from an operand"
    if name == "clamp" and (not of_data or tuple(node.args[1:]) != (form.limits or ())):
        return f"clamp to {tuple(node.args[1:])}, and not to {form.limits}"
    if name == "softplus" and len(node.args) > 1:
        return f"softplus with {tuple(node.args[1:])}"
    return None


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" else target._schema.name
    return str(getattr(target, "__name__", target))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
