"""Knowledge about graphs' inputs and outputs (borders.py) as data: for the key of a rewrite, and to be told again without the passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from attn_compiler.index_expr import Expr
from attn_compiler.passes.recovering.borders import Border
from attn_compiler.passes.recovering.reading.borders import Made
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.torch_private import frames as torch_frames, known_masks
from attn_compiler.torch_private.known_masks import Known

_CODEC = AttentionSpec.codec.extended(Known)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldInRow:
    """Knowledge about one output, told to the graphs that follow in a row.

    node: index in the graph of the node with the output's value. loads: names that the element loads from, each with the index of its
    input.
    """

    node: int
    element: Expr
    loads: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """Knowledge about a graph's outputs, and the inputs about which the graph relied on knowledge: their indices in the graph."""

    in_row: tuple[ToldInRow, ...] = ()
    known: tuple[tuple[int, Known], ...] = ()
    relied_on: tuple[int, ...] = ()


PARTS = (ToldInRow, Crossing, Known)


def input_knowledge(gm: fx.GraphModule, border: Border) -> list[Any]:
    """Return, for each input, all that the passes can learn of it from earlier graphs: what reading/borders.py looks at, as data."""
    inputs = gm.graph.find_nodes(op="placeholder")
    examples = [node.meta.get("example_value") for node in inputs]
    found: list[Any] = []
    for node, example in zip(inputs, examples, strict=True):
        made = border.row.find(example)
        known = known_masks.recall(torch_frames.given_tensor(node))
        if made is None and known is None:
            found.append(None)
            continue
        loads = [] if made is None else [(name, _place(x, examples)) for name, x in made.loads.items()]
        element = None if made is None else _CODEC.data(made.element)
        found.append((element, loads, _CODEC.data(known), border.row.is_written([example])))
    return found


def _place(value: object, among: Sequence[object]) -> int | None:
    return next((place for place, other in enumerate(among) if other is value), None)


def record_crossing(
    border: Border, known: Sequence[tuple[int, Known]], nodes: Sequence[fx.Node], values: Sequence[object]
) -> Crossing:
    """Return what was told and relied on. known: from `crossed`. nodes, values: of the graph as Dynamo made it. Raises Unkeyed."""
    made = [] if border.root is None else [made for made in border.row.made if made.graph == border.place]
    relied_on = {} if border.root is None else border.readers.relied_on.get(border.root, {})
    return Crossing(
        in_row=tuple(_told(one, values) for one in made),
        known=tuple(known),
        relied_on=tuple(place for place, node in enumerate(nodes) if node in relied_on),
    )


def _told(made: Made, values: Sequence[object]) -> ToldInRow:
    node = _place(made.example, values)
    loads = tuple((name, place) for name, x in made.loads.items() if (place := _place(x, values)) is not None)
    if node is None or len(loads) < len(made.loads):
        raise Unkeyed("what the graph gives back is not found among its values")
    return ToldInRow(node=node, element=made.element, loads=loads)


def was_heard(nodes: Sequence[fx.Node]) -> bool:
    """Return whether the passes could rely on all that is known of a graph's inputs. If not, another process might, with the same key."""
    for node in nodes:
        known = known_masks.recall(torch_frames.given_tensor(node)) if node.op == "placeholder" else None
        if known is not None and not torch_frames.has_room_for(node, known):
            return False
    return True


def may_be_told(crossing: Crossing, nodes: Sequence[fx.Node]) -> bool:
    """Return whether the current compilation may rely on the same knowledge as the passes did."""
    for place in crossing.relied_on:
        known = known_masks.recall(torch_frames.given_tensor(nodes[place]))
        if known is None or not torch_frames.may_rely_on(nodes[place], known):
            return False
    return True


def tell_again(crossing: Crossing, border: Border, nodes: Sequence[fx.Node], values: Sequence[object]) -> None:
    """Tell the graphs that follow in a row, and guard the knowledge relied on, as borders.crossed does after the passes."""
    for told in crossing.in_row:
        example: Any = values[told.node]
        loads: dict[str, Any] = {name: values[place] for name, place in told.loads}
        border.row.made.append(Made(example=example, element=told.element, loads=loads, graph=border.place))
    for place in crossing.relied_on:
        known = known_masks.recall(torch_frames.given_tensor(nodes[place]))
        if known is not None:
            torch_frames.guard_known(nodes[place], known)
