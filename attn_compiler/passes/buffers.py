"""Tensors that compiled code keeps from call to call: buffers of the root graph module, which the graph reads and writes in place.

A body of a checkpoint gets them, and what they held before the call, as further inputs: recomputation in the backward then sees what
the forward saw, and the write happens once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from attn_compiler import fp8_state, torch_compat, torch_frames
from attn_compiler.passes import body_inputs
from attn_compiler.passes.site import Site
from attn_compiler.passes.unit import Buffer, Unit

_PREFIX = "attn_compiler_buffer"


def why_not(unit: Unit) -> str | None:
    """Why the sites of a graph can't have buffers; None if they can."""
    return body_inputs.why_not(unit) if unit.is_body else None


def make(unit: Unit, site: Site, name: str, value: torch.Tensor) -> tuple[fx.Node, fx.Node]:
    """The node of a buffer, and of what it held before the call. To be used at the site. value: fake."""
    label = f"{site.module}/{name}"
    path = unit.name.split(".") if unit.is_body else []
    attribute = "_".join((_PREFIX, *path, str(len(unit.buffers))))
    if unit.is_body:
        node, held = (body_inputs.add(unit, f"{attribute}{suffix}", value) for suffix in ("", "_held"))
        unit.buffers.append(Buffer(name=attribute, label=label, value=value, inputs=(node, held)))
        return node, held
    unit.buffers.append(Buffer(name=attribute, label=label, value=value))
    _register(unit.graph_module, unit.buffers[-1])
    return _read(unit.graph, attribute, value)


def install(root: fx.GraphModule, units: Sequence[Unit]) -> None:
    """Have what bodies' sites asked for in the root, where their calls can give it to them. With any buffers, another module than this one
    gets code, and so buffers, of its own."""
    if any(unit.buffers for unit in units):
        torch_frames.guard_modules()
    for unit in units:
        for buffer in unit.buffers if unit.is_body else ():
            _register(root, buffer)
            with root.graph.inserting_before(unit.calls[0].node):
                unit.given |= dict(zip(buffer.inputs, _read(root.graph, buffer.name, buffer.value), strict=True))


def forget(unit: Unit, kept: int) -> None:
    """Nothing that sites asked for after the first `kept` buffers is wanted; their nodes are erased already."""
    for buffer in unit.buffers[kept:]:
        if not unit.is_body:
            torch_compat.remove_buffer(unit.graph_module, buffer.name)
    del unit.buffers[kept:]


def discard(root: fx.GraphModule, units: Iterable[Unit]) -> None:
    """Nothing was rewritten after all."""
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        torch_compat.remove_buffer(root, buffer.name)


def _register(root: fx.GraphModule, buffer: Buffer) -> None:
    with torch_compat.real_tensors():
        tensor = torch.zeros(buffer.value.shape, dtype=buffer.value.dtype, device=buffer.value.device)
    torch_compat.add_buffer(root, buffer.name, tensor)
    fp8_state.keep(buffer.label, tensor)


def _read(graph: fx.Graph, name: str, value: torch.Tensor) -> tuple[fx.Node, fx.Node]:
    node = graph.get_attr(name)
    held = graph.call_function(torch.ops.attn_compiler.held.default, (node,))
    node.meta["example_value"], held.meta["example_value"] = value, value.clone()
    return node, held
