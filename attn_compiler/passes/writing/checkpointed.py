"""The report's note on attention to be kept under checkpoints (`options={"checkpoint": "keep_attention"}`): bytes, or why nothing is kept.

lowerings/graph_ops/kept.py keeps it, on the traced graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rich.filesize import decimal
from torch import fx

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.passes.graph.calls import target_name
from attn_compiler.passes.graph.site import Site
from attn_compiler.passes.graph.unit import FoundSites, Unit
from attn_compiler.torch_private import inductor as torch_inductor, marks

_CHECKPOINT = "tag_activation_checkpoint"
#: an attention op's first results: the output and the lse
_OUTPUTS = 2


def tell(unit: Unit, found: FoundSites) -> None:
    """Put a note on every site of a unit whose sites are lowered."""
    if not unit.options.keeps_attention:
        return
    of_graph = _why_nothing(unit)
    for site in found.sites:
        site.notes.append(f"checkpoint: {_of_site(unit, site, of_graph)}")


def _of_site(unit: Unit, site: Site, of_graph: str | None) -> str:
    """Return a site's note. of_graph: why nothing of the graph is kept, if nothing is."""
    if site.spec is not None and not site.spec.needs_grad:
        return "nothing is kept, it has no backward"
    if of_graph is not None:
        return f"nothing is kept, {of_graph}"
    if site.decision is None or site.decision.lowering == UNTOUCHED:
        return "kept only where PyTorch runs it as one of its own kernels, since it stays as the model has it"
    if not site.forwards:
        return f"nothing is kept, {site.decision.lowering} has no op whose output and lse could be"
    size = sum(map(_bytes, site.forwards))
    words = decimal(size) if isinstance(size, int) else f"{size} bytes"
    has_policy = any(marks.has_policy(body.graph_module) for body in _checkpoints(unit))
    unless = ", unless the checkpoint's own policy says MUST_RECOMPUTE" if has_policy else ""
    return f"its output and lse are kept, {words} a layer; its forward runs once a step{unless}"


def _why_nothing(unit: Unit) -> str | None:
    if not any(_checkpoints(unit)):
        return "it is in no checkpoint of this graph; a checkpoint around compiled code runs all of that again"
    if unit.options.inner != "inductor":
        return f"inner={unit.options.inner!r} goes by the checkpoint alone"
    outermost = (one for one in _around(unit) if not one.place.calls)
    if any(torch_inductor.has_own_backward(one.graph_module) for one in outermost):
        return "the graph asks for gradients itself, and PyTorch parts such a graph by the checkpoint alone"
    return None


def _around(unit: Unit) -> Iterator[Unit]:
    """Yield the unit, and those whose graphs run it."""
    yield unit
    for call in unit.place.calls:
        yield from _around(call.unit)


def _checkpoints(unit: Unit) -> Iterator[Unit]:
    """Yield the bodies of checkpoints among `_around`."""
    return (one for one in _around(unit) if any(target_name(call.node) == _CHECKPOINT for call in one.place.calls))


def _bytes(node: fx.Node) -> int | torch.SymInt:
    outputs: tuple[torch.Tensor, ...] = node.meta["example_value"][:_OUTPUTS]
    sizes = [output.numel() * output.element_size() for output in outputs]
    return sizes[0] + sizes[1]
