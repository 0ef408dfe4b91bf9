"""Tensors that compiled code keeps from call to call: buffers of the root graph module, which the graph reads and writes in place.

A body of a checkpoint gets them, and their values before the call, as further inputs: recomputation in the backward then sees what
the forward saw, and the write happens once. Graphs that run the same place of the same module share them (fp8_state.py).
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import fx

from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import Buffer, Unit
from attn_compiler.passes.recovering import body_inputs
from attn_compiler.passes.writing import fp8_state
from attn_compiler.torch_private import compat as torch_compat, frames as torch_frames

_PREFIX = "attn_compiler_buffer"
#: Dynamo's meta that tells the origin of a node
_META = ("nn_module_stack", "stack_trace")


def why_not(unit: Unit) -> str | None:
    """Return why the sites of a graph can't have buffers; None if they can."""
    return body_inputs.why_not(unit) if unit.is_body else None


def make(unit: Unit, site: Site, name: str, value: torch.Tensor) -> tuple[fx.Node, fx.Node]:
    """Return the node of a buffer, and of its value before the call. To be used at the site. value: fake."""
    path = unit.name.split(".") if unit.is_body else []
    attribute = "_".join((_PREFIX, *path, str(len(unit.written.buffers))))
    if unit.is_body:
        node, held = (body_inputs.add(unit, f"{attribute}{suffix}", value) for suffix in ("", "_held"))
        inputs: tuple[fx.Node, ...] = (node, held)
    else:
        # `install` fills it, when all sites are known.
        torch_compat.add_buffer(unit.graph_module, attribute, _zeros(value))
        node, held = _read(unit.graph, attribute, value)
        inputs = ()
    origin = None if unit.mirror is None else unit.mirror.owner(site.match.out)
    meta = {} if origin is None else {name: origin.meta.get(name) for name in _META}
    label = f"{site.module}/{name}"
    unit.written.buffers.append(Buffer(name=attribute, label=label, value=value, site=site, origin=meta, inputs=inputs))
    return node, held


def install(root: fx.GraphModule, units: Sequence[Unit]) -> None:
    """Give the root the buffers of its sites and of bodies' sites, where bodies' calls can pass them on.

    A buffer is one that another graph keeps for the same module, or zeros. With any buffers, another module than this one gets its own
    code.
    """
    if any(unit.written.buffers for unit in units):
        torch_frames.guard_modules()
    every = [(unit, buffer) for unit in units for buffer in unit.written.buffers]
    times: Counter[Hashable] = Counter()
    homes = [_home(buffer, times) for _, buffer in every]
    tensors = [_known(buffer, home) for (_, buffer), home in zip(every, homes, strict=True)]
    for (unit, buffer), home, known in zip(every, homes, tensors, strict=True):
        torch_compat.add_buffer(root, buffer.name, _new(buffer, home) if known is None else known)
        if unit.is_body:
            with root.graph.inserting_before(unit.place.calls[0].node):
                unit.written.given.update(
                    dict(zip(buffer.inputs, _read(root.graph, buffer.name, buffer.value), strict=True))
                )


def forget(unit: Unit, kept: int) -> None:
    """Remove the buffers after the first `kept`; their nodes are erased already."""
    for buffer in unit.written.buffers[kept:]:
        if not unit.is_body:
            torch_compat.remove_buffer(unit.graph_module, buffer.name)
    del unit.written.buffers[kept:]


def _known(buffer: Buffer, home: fp8_state.Home | None) -> torch.Tensor | None:
    """Return the buffer that an earlier graph keeps for the same home. If there is one that does not fit, the site says why."""
    found = fp8_state.find(home)
    training = _trains(buffer)
    other = None if found is not None else fp8_state.others(buffer.label, home, training=training)
    if other is not None:
        step = "with gradients" if training else "without gradients"
        buffer.site.notes.append(
            f"fp8_recipe: a step {step} by this graph has histories of its own, not those of a graph before: {other}"
        )
    return found


def _new(buffer: Buffer, home: fp8_state.Home | None) -> torch.Tensor:
    tensor = _zeros(buffer.value)
    fp8_state.register(buffer.label, tensor, home, training=_trains(buffer))
    return tensor


def _trains(buffer: Buffer) -> bool:
    return buffer.site.spec is not None and buffer.site.spec.needs_grad


def _home(buffer: Buffer, times: Counter[Hashable]) -> fp8_state.Home | None:
    """Return the place that a buffer's history belongs to. times: the count of each place of each module so far.

    A module that runs several times has a history for each time.
    """
    owner, spec = torch_frames.owner_of(buffer.origin.get("nn_module_stack")), buffer.site.spec
    if owner is None or spec is None:
        return None
    place = (_lines(buffer.origin.get("stack_trace") or ""), buffer.label.rpartition("/")[2])
    times[id(owner), place] += 1
    # Only shapes tell apart the calls of a function.
    shapes = None if isinstance(owner, torch.nn.Module) else (spec.q.shape, spec.k.shape, spec.v.shape)
    kind = (spec.fp8, tuple(buffer.value.shape), str(buffer.value.device), shapes)
    return fp8_state.Home(owner=weakref.ref(owner), place=(place, times[id(owner), place]), kind=kind)


def _lines(stack_trace: str) -> tuple[tuple[str, str], ...]:
    """Return the lines of code from the module's own `forward` inwards: its callers differ from graph to graph."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', stack_trace)
    first = max((i for i, (*_, function) in enumerate(frames) if "forward" in function), default=0)
    return tuple((file, line) for file, line, _ in frames[first:])


def discard(root: fx.GraphModule, units: Iterable[Unit]) -> None:
    """Remove all buffers, since nothing was rewritten after all."""
    for buffer in (buffer for unit in units for buffer in unit.written.buffers):
        torch_compat.remove_buffer(root, buffer.name)


def _zeros(value: torch.Tensor) -> torch.Tensor:
    # No graph for training could write to a tensor of inference mode.
    with torch_compat.real_tensors(), torch.inference_mode(False):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


def _read(graph: fx.Graph, name: str, value: torch.Tensor) -> tuple[fx.Node, fx.Node]:
    node = graph.get_attr(name)
    held = graph.call_function(torch.ops.attn_compiler.held.default, (node,))
    node.meta["example_value"], held.meta["example_value"] = value, value.clone()
    return node, held
