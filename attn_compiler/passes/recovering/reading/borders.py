"""Inputs of a graph that are outputs of another graph: facts that were proved there hold here.

There are two ways. Graphs that were cut out of one (DDP's buckets) share Dynamo's example values, run in a row, and are compiled
in that order: an output of one is known in the next without any check. Any other tensor comes in as an argument: the facts about
that very tensor (known_masks.py) hold as long as a guard finds the same facts.

The tensors behind a mask, such as padding, may be missing on the other side. A row of the mask replaces them if no other condition
masks a key in that row that it allows in another row. For "causal, and these keys are padding", that is the last query's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Apply, Const, Expr, Index, Linear, Load, Ranges, Test
from attn_compiler.index_expr.changing import throughout
from attn_compiler.index_expr.junctions import split
from attn_compiler.passes.graph import axes, mutation
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.recovering.reading.converting import kind_of_dtype
from attn_compiler.passes.recovering.reading.core import At, Reader
from attn_compiler.passes.recovering.reading.nodes import fake, size
from attn_compiler.torch_private import frames as torch_frames, known_masks
from attn_compiler.torch_private.known_masks import ITSELF, Known, own_element, size_of_axis


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """An output of one of several graphs in a row.

    example: Dynamo's value, which the graphs share. element: over known_masks.indices. loads: Dynamo's values, by name, of the tensors
    that the element loads from; they are inputs of that graph, which does not write to them. graph: its place in the row.
    """

    example: torch.Tensor
    element: Expr
    loads: dict[str, torch.Tensor]
    graph: int


@dataclass(kw_only=True, eq=False)
class GraphRow:
    """Graphs that were cut out of one, in execution order. written: the memory that each of them writes to."""

    written: list[set[object]] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)

    def find(self, example: object) -> Made | None:
        """Return the facts about a value; None if a later graph wrote to it, or to a tensor that it was made from."""
        made = next((m for m in self.made if m.example is example), None)
        if made is None:
            return None
        return None if self.is_written([made.example, *made.loads.values()], since=made.graph + 1) else made

    def is_written(self, values: Sequence[object], *, since: int = 0) -> bool:
        """True if a graph from the place `since` on writes to one of these values."""
        memory = mutation.storages_of(values)
        return any(memory & written for written in self.written[since:])


class BorderInputs:
    """Reads inputs of a unit's graph by known facts. relied_on: filled with the inputs and facts that were used, which need guards."""

    are_of_body = False

    def __init__(self, unit: Unit, relied_on: dict[fx.Node, Known]) -> None:
        self._unit = unit
        self._relied_on = relied_on
        self._known: dict[fx.Node, Expr | None] = {}

    def element(self, reader: Reader, node: fx.Node, at: At) -> Expr | None:
        """The element of an input at `at`; None if nothing is known of it."""
        dynamo = reader.mirror.dynamo_node(node)
        if dynamo is None:
            return None
        if dynamo not in self._known:
            self._known[dynamo] = self._looked_up(reader, dynamo, node)
        found = self._known[dynamo]
        return None if found is None else self._here(found, reader, node, at)

    def _looked_up(self, reader: Reader, dynamo: fx.Node, node: fx.Node) -> Expr | None:
        """Return the known element of an input, in loads of itself and of other inputs (by name), or None."""
        value = fake(node)
        row, example = torch_frames.once_per_compilation(GraphRow), dynamo.meta.get("example_value")
        made = row.find(example)
        if made is not None:
            given = {name: _input_like(self._unit, example) for name, example in made.loads.items()}
            names = {name: place.name for name, place in given.items() if place is not None}
            element = of_itself(made.element, made.element.facts.tensors - names.keys(), value)
            return None if element is None else _renamed(element, names)
        known = known_masks.recall(torch_frames.given_tensor(dynamo))
        # The facts hold at the beginning of the frame: a graph before this one may write to the tensor.
        if known is None or known.dims != value.dim() or row.is_written([example]):
            return None
        if not torch_frames.may_rely_on(dynamo, known):
            return None
        self._relied_on[dynamo] = known
        return known.element

    def _here(self, x: Expr, reader: Reader, node: fx.Node, at: At) -> Expr:
        """Return a known element at these indices, with the loads and sizes of this graph."""
        inputs = {n.name: n for n in reader.mirror.graph.nodes if n.op == "placeholder"}
        dynamo_names = {d.name: n for n in inputs.values() if (d := reader.mirror.dynamo_node(n)) is not None}
        lengths = {size_of_axis(i): size(axes.size_expr(s)) for i, s in enumerate(fake(node).shape)}
        indices = dict(zip(known_masks.indices(len(at)), at, strict=True))

        def change(part: Expr) -> Expr:
            if isinstance(part, Index):
                return indices.get(part, part)
            if isinstance(part, ix.Size):
                return lengths.get(part) or part
            if isinstance(part, Load):
                # The tensor as it came in, before any write in this graph.
                return reader.load_at(0, node if part.tensor == ITSELF else dynamo_names[part.tensor], part.at)
            return part

        return throughout(x, change)


def _renamed(x: Expr, names: dict[str, str]) -> Expr:
    def change(part: Expr) -> Expr:
        return Load(names.get(part.tensor, part.tensor), part.at, part.kind) if isinstance(part, Load) else part

    return throughout(x, change)


def _input_like(unit: Unit, example: torch.Tensor) -> fx.Node | None:
    """The input of a graph that is this value of Dynamo's."""
    return next((n for n in unit.graph.find_nodes(op="placeholder") if n.meta.get("example_value") is example), None)


def known_of(x: Expr, value: torch.Tensor) -> Known | None:
    """Return the facts about a tensor in terms of the tensor alone, or None. x: its element, over known_masks.indices."""
    found = of_itself(x, x.facts.tensors, value)
    # The sizes of a small graph are often all symbols of their own, although a call has as many keys as queries.
    if_square = found is None
    found = of_itself(x, x.facts.tensors, value, if_square=True) if if_square else found
    if found is None:
        return None
    by_size = {size(axes.size_expr(s)): size_of_axis(axis) for axis, s in enumerate(value.shape)}
    element = throughout(found, lambda part: by_size.get(part, part) if isinstance(part, ix.Size) else part)
    own = {size_of_axis(axis).name for axis in range(value.dim())}
    known = Known(element=element, dims=value.dim(), if_square=if_square)
    return known if ix.sizes(element) <= own else None


def of_itself(x: Expr, foreign: Iterable[str], value: torch.Tensor, *, if_square: bool = False) -> Expr | None:
    """Replace missing tensors in x by a row of the tensor itself; None if no row says the same. value: the tensor. if_square: say what
    holds where the tensor has as many keys as queries."""
    foreign = frozenset(foreign)
    if not x.facts.tensors & foreign:
        return x
    rows = _rows(value, if_square)
    if ix.kind_of(x) == "bool":
        return _condition(x, foreign, value, rows, lambda at: own_element(at, "bool"))
    if isinstance(x, Apply) and x.op == "where" and _are_two_numbers(x):
        condition, chosen, _ = x.args
        kind = kind_of_dtype(value.dtype)
        told = _condition(condition, foreign, value, rows, lambda at: ix.apply("eq", own_element(at, kind), chosen))
        return None if told is None else ix.where(told, *x.args[1:])
    return None


def _are_two_numbers(x: Apply) -> bool:
    _, a, b = x.args
    return (
        isinstance(a, Const)
        and isinstance(b, Const)
        and a.value != b.value
        and a.value == a.value
        and b.value == b.value
    )


def _condition(
    x: Expr,
    foreign: frozenset[str],
    value: torch.Tensor,
    rows: Sequence[tuple[Expr, Expr]],
    element: Callable[[tuple[Expr, ...]], Expr],
) -> Expr | None:
    """Replace missing tensors in a condition by an element of the tensor itself in one of the rows, or return None. element: returns the
    condition that an element stands for."""
    if not rows:
        return None
    *before, query, key = known_masks.indices(value.dim())
    # A row expresses every condition that is the same for all queries: the padding keys, and their number.
    rest = [part for part in split("and", x) if ix.mentions(part, query)]
    if any(part.facts.tensors & foreign for part in rest):
        return None
    ranges = _ranges(value)
    for row, place in rows:
        if all(_holds_there(part, query, row, ranges) for part in rest):
            return ix.apply("and", *rest, element((*before, place, key)))
    return None


def _holds_there(x: Expr, query: Index, row: Expr, ranges: Ranges) -> bool:
    """True if x, wherever it allows a key for some query, allows it for the query `row`, too: a key that is masked there is masked for
    all queries. This holds for the diagonal and the last query, however many keys there are."""
    there = ix.substitute(x, query, row)
    if ix.decide(there, ranges) == ix.TRUE:
        return True
    if not (isinstance(x, Test) and isinstance(there, Test) and x.relation == there.relation == ">="):
        return False
    return ix.decide(Test(">=", ix.combine(there.form, x.form, -1)), ranges) == ix.TRUE


def _rows(value: torch.Tensor, if_square: bool) -> Sequence[tuple[Expr, Expr]]:
    """Return queries that may see every key that any query sees: the last one and, on a square, each key's own. Each is an index of this
    tensor, and an index of any such tensor."""
    if value.dim() < 2:
        return ()
    queries, keys = (axes.size_expr(s) for s in value.shape[-2:])
    key, last = known_masks.indices(value.dim())[-1], size(queries)
    found: list[tuple[Expr, Expr]] = []
    if last is not None:
        found.append((ix.add(last, Const(-1)), ix.add(size_of_axis(value.dim() - 2), Const(-1))))
    may_be_square = if_square and any(isinstance(s, torch.SymInt) for s in value.shape[-2:])
    return [*found, (key, key)] if queries == keys or may_be_square else found


def _ranges(value: torch.Tensor) -> Ranges:
    known = {
        i.name: size(axes.size_expr(s)) for i, s in zip(known_masks.indices(value.dim()), value.shape, strict=True)
    }
    return {name: ix.combine(ix.linear(n), Linear((), 1), -1) for name, n in known.items() if n is not None}
