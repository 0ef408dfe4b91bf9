"""Record facts about a graph's outputs that other graphs may use as masks, and guard the facts that this graph relied on.

reading/borders.py uses these facts in the other graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr
from attn_compiler.options.options import Options
from attn_compiler.passes.graph import faults, mutation
from attn_compiler.passes.graph.aliasing import Aliases
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mirroring import handed_on, may_be_of_mask
from attn_compiler.passes.graph.unit import Unit, UnitPlace
from attn_compiler.passes.recovering import buffers, reading
from attn_compiler.passes.recovering.reading import Reader, Unreadable
from attn_compiler.passes.recovering.reading.borders import GraphRow, Made, known_of
from attn_compiler.passes.recovering.reading.readers import Readers
from attn_compiler.torch_private import frames as torch_frames, known_masks, tracing as torch_tracing
from attn_compiler.torch_private.known_masks import Known


@dataclass(kw_only=True, eq=False)
class Border:
    """State of the outermost graph during the passes, for its inputs and outputs.

    root: None if the graph has no attention, and no output that may be a mask. read: positions of the inputs that may be masks, and that
    the graph does not write to.
    """

    root: Unit | None
    row: GraphRow
    place: int
    readers: Readers
    read: tuple[int, ...] = ()


def reached(gm: fx.GraphModule, units: Iterable[Unit], options: Options, readers: Readers) -> Border:
    """Start the border of a graph, before any rewrite. Also read masks that the graph's modules hold (buffers.py)."""
    row = torch_frames.once_per_compilation(GraphRow)
    root = next((unit for unit in _with_callers(units) if unit.graph_module is gm), None)
    reach = Aliases(graph=gm.graph)
    if root is not None:
        buffers.look(reach)
    gives = [node.meta["example_value"] for node in handed_on(gm.graph)]
    mode = torch_tracing.fake_mode_of_values(gives) if root is None else None
    if mode is not None:
        root = Unit.of(gm, options, UnitPlace(name="", mode=mode))
    if gives or row.made or known_masks.are_any():
        row.written.append(set(reach.written))
    return Border(root=root, row=row, place=len(row.written) - 1, readers=readers, read=tuple(_read(reach)))


def _read(reach: Aliases) -> Iterator[int]:
    for place, node in enumerate(reach.graph.find_nodes(op="placeholder")):
        if node.users and may_be_of_mask(node.meta.get("example_value")) and not reach.inputs[place] & reach.written:
            yield place


def _with_callers(units: Iterable[Unit]) -> Iterator[Unit]:
    for unit in units:
        yield unit
        yield from _with_callers(call.unit for call in unit.place.calls)


def crossed(border: Border) -> tuple[tuple[int, Known], ...]:
    """Return facts about the graph's outputs, by position. Record them for later graphs of the row, and guard the facts relied on."""
    root = border.root
    if root is None:
        return ()
    told: list[tuple[int, Known]] = []
    if root.log.left_alone is None and (root.mirror is not None or not root.is_rewritten):
        with faults.confined(root.log, "borders", "what the graph gives back"), torch_tracing.tracing_in(root.mode):
            told += _told(border, root)
    for placeholder, known in border.readers.relied_on.get(root, {}).items():
        torch_frames.guard_known(placeholder, known)
    return tuple(told)


def _told(border: Border, root: Unit) -> Iterator[tuple[int, Known]]:
    if not handed_on(root.graph):
        return
    reader = border.readers.of(root)
    for place, node, example in _outputs(reader.mirror):
        try:
            at = known_masks.indices(reading.fake(node).dim())
            found = reader.read_at(len(reader.mirror.graph.nodes), node, at)
            element = ix.decide(found, reader.within(found, node, at))
        except Unreadable:
            continue
        border.row.made.append(
            Made(example=example, element=element, loads=_unwritten(reader, element), graph=border.place)
        )
        known = known_of(element, example)
        if known is not None:
            yield place, known


def _outputs(mirror: Mirror) -> Iterator[tuple[int, fx.Node, torch.Tensor]]:
    """Yield outputs that may be masks, or make one, and share no memory: position, mirror node, Dynamo's value."""
    (given,) = mirror.graph.output_node().args
    every: list[Any] = list(given) if isinstance(given, (tuple, list)) else [given]
    nodes = [node for node in every if isinstance(node, fx.Node)]
    memory = [mutation.storages(node) for node in (*mirror.graph.find_nodes(op="placeholder"), *dict.fromkeys(nodes))]
    for place, node in enumerate(every):
        dynamo = mirror.dynamo_node(node) if isinstance(node, fx.Node) else None
        example: Any = dynamo.meta.get("example_value") if dynamo is not None else None
        if not may_be_of_mask(example) or nodes.count(node) > 1:
            continue
        if sum(bool(mutation.storages(node) & other) for other in memory) == 1 and _is_like(node, example):
            yield place, node, example


def _is_like(node: fx.Node, example: torch.Tensor) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype == example.dtype and value.dim() == example.dim()


def _unwritten(reader: Reader, element: Expr) -> dict[str, torch.Tensor]:
    """Return Dynamo's values, by name, of the inputs that an element loads from and that the graph does not write to."""
    found = {}
    for name in element.facts.tensors:
        version = reader.tensors[name]
        dynamo = reader.mirror.dynamo_node(version.node) if version.node.graph is reader.mirror.graph else None
        if version.node.op == "placeholder" and version.since is None and version.until is None and dynamo is not None:
            found[name] = dynamo.meta["example_value"]
    return found
