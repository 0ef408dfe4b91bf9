"""Numbers that the mirror holds as tensors: `torch.full([], 8.0)`, `torch.tensor(0.125)`, `sqrt` of one, and so on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attn_compiler.passes.graph import mutation, views
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.torch_private import symbols as torch_symbols

aten = torch.ops.aten
_MAX_DEPTH = 8

#: ops that make or change one number, safe to run on real tensors while compiling
_FOLDABLE = frozenset(
    {
        aten.full.default,
        aten.scalar_tensor.default,
        aten.zeros.default,
        aten.ones.default,
        aten.sqrt.default,
        aten.rsqrt.default,
        aten.reciprocal.default,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.clone.default,
        aten.detach.default,
        aten.detach_.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
    }
)


#: ops that take shape and dtype from a tensor, and the number as an argument
_FILLED = frozenset({aten.new_full.default, aten.full_like.default})


def number(mirror: Mirror, value: Any) -> float | None:
    """Return the number that an argument of a mirror node is, if it is known while compiling; never a symbolic one.

    A tensor that is written in place anywhere in the graph has no such number: its value depends on when it is read.
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, fx.Node):
        return None
    folded = _fold(mirror, value, _MAX_DEPTH)
    return float(folded.item()) if folded is not None and folded.numel() == 1 else None


#: ops that fill a tensor with one number -> that number, or the name of the argument that holds it
_UNIFORM: dict[object, float | str] = {
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.new_full.default), "fill_value"),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0.0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1.0),
}


def everywhere(mirror: Mirror, value: Any) -> float | None:
    """Return the number that all elements of a tensor, or a number itself, are known to be while compiling; None as in `number`.

    It is rounded like the model's: to the dtype of the tensor, and of each cast of it.
    """
    found = number(mirror, value)
    if found is not None or not isinstance(value, fx.Node):
        return found
    path = [value]
    while views.is_view(path[-1]) or path[-1].target in views.CASTS:
        path.append(views.source(path[-1]))
    if path[-1].target not in _UNIFORM or any(mutation.is_written_later(mirror, node) for node in path):
        return None
    found = _fill(mirror, path[-1])
    for node in reversed(path if found is not None else []):
        found = float(torch.tensor(found, dtype=torch.float64).to(views.value(node).dtype))
    return found


def _fill(mirror: Mirror, node: fx.Node) -> float | None:
    """Return the number that an op of _UNIFORM gives everywhere, before it is rounded to the result's dtype."""
    fill = _UNIFORM[node.target]
    return number(mirror, views.argument(node, fill)) if isinstance(fill, str) else fill


def fixed(value: Any) -> float | None:
    """Return the value of a symbolic float argument in this call, which a guard fixes from here on; None for anything else.

    For a number that a kernel is compiled with and no tensor can hold: dynamic=True makes symbolic floats of a model's own numbers.
    """
    symbolic = value.meta.get("val") if isinstance(value, fx.Node) else None
    return torch_symbols.fixed(symbolic) if isinstance(symbolic, torch.SymFloat) else None


def _fold(mirror: Mirror, node: fx.Node, depth: int) -> torch.Tensor | None:
    if mutation.is_written_later(mirror, node):
        return None
    held = mirror.constant(node)
    if held is not None:
        return held.detach().cpu() if held.numel() == 1 else None
    fake = node.meta.get("val")
    if depth == 0 or not isinstance(fake, torch.Tensor) or fake.dim() > 4:
        return None
    if any(not isinstance(s, int) or s != 1 for s in fake.shape):
        return None
    if node.target in _FILLED:
        fill = _fill(mirror, node)
        return None if fill is None else torch.tensor(fill, dtype=fake.dtype)
    if node.target not in _FOLDABLE:
        return None
    args: list[Any] = []
    for arg in node.args:
        folded = _fold(mirror, arg, depth - 1) if isinstance(arg, fx.Node) else arg
        if folded is None or isinstance(folded, (torch.SymFloat, torch.SymInt)):
            return None
        args.append(folded)
    kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")}
    if node.target is aten.to.device:
        moved: torch.Tensor = args[0]
        return moved
    if any(isinstance(v, fx.Node) for v in kwargs.values()):
        return None
    op: Any = node.target
    result: torch.Tensor = op(*args, **kwargs)
    return result
