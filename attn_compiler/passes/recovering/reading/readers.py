"""One reader for each graph of a compilation. It follows inputs to their origins, and results into bodies."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Expr
from attn_compiler.passes.graph import mirroring, mutation
from attn_compiler.passes.graph.mirror import Mirror, opaque
from attn_compiler.passes.graph.unit import Unit, is_anchor_like, unsupported_tensor
from attn_compiler.passes.recovering.reading import READERS, inside
from attn_compiler.passes.recovering.reading.borders import BorderInputs
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp, Unreadable
from attn_compiler.passes.recovering.reading.inputs import BodyInputs, are_alike
from attn_compiler.torch_private.known_masks import Known


def _may_be_an_input(node: fx.Node) -> bool:
    """True if a result shares memory with an argument of the call, so that writes to one are seen in the other."""
    memory = mutation.storages(node)
    return any(memory & mutation.storages(source) for source in node.all_input_nodes)


def _can_be_read(body: Unit) -> bool:
    """True for a body that is called once, and whose mirror exists or is made by no other step."""
    ready = body.mirror is not None or not any(map(is_anchor_like, body.graph.nodes))
    return ready and len(body.place.calls) == 1 and unsupported_tensor(body.graph_module) is None


def _output(mirror: Mirror, position: int) -> fx.Node | None:
    (given,) = mirror.graph.output_node().args
    made = given[position] if isinstance(given, (tuple, list)) and position < len(given) else None
    return made if isinstance(made, fx.Node) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Readers:
    """Readers by graph. longer: for each graph, sizes that stand for larger ones, since ranks share a sequence: an index along such an axis
    runs up to the larger size. relied_on: for each graph, the inputs whose facts were used, with the facts (borders.py).

    A graph that no step works on gets its mirror here, once a mask is followed into it. Other graphs get theirs in the step mirror.
    """

    longer: dict[Unit, Mapping[int, int]] = field(default_factory=dict)
    relied_on: dict[Unit, dict[fx.Node, Known]] = field(default_factory=dict)
    _made: dict[Unit, Reader] = field(default_factory=dict)

    def of(self, unit: Unit) -> Reader:
        """The reader of a graph as it is now."""
        if unit.mirror is None:
            unit.mirror = mirroring.trace_mirror(unit)
        known = self._made.get(unit)
        if known is None or known.mirror is not unit.mirror:
            relied_on = self.relied_on.setdefault(unit, {})
            inputs = BodyInputs(unit.place.calls, self.of) if unit.is_body else BorderInputs(unit, relied_on)
            known = self._made[unit] = Reader(
                unit.mirror,
                {**READERS, opaque: self._results_of_calls(unit)},
                inside.reached,
                inputs,
                longer=self.longer.get(unit, {}),
            )
        return known

    def _results_of_calls(self, unit: Unit) -> ReadOp:
        def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
            found = self._result(unit, reader, node, at)
            return found if found is not None else READERS[opaque](reader, node, at)

        return read

    def _result(self, unit: Unit, reader: Reader, node: fx.Node, at: At) -> Expr | None:
        """Return the element of a result of a higher-order call, read inside the body that computes it: T5 computes its bias in its first
        layer, for all layers. None if it depends on tensors that only the body has, or can't be read there."""
        given = reader.mirror.dynamo_node(node)
        if given is None or given.target is not operator.getitem or _may_be_an_input(node):
            return None
        call, position = given.args
        body = next((body for known, body in unit.place.callees if known.node is call), None)
        if body is None or not isinstance(position, int) or not _can_be_read(body):
            return None
        below = self.of(body)
        made = _output(below.mirror, position)
        if made is None or below.varies(made) or not are_alike(made, node):
            return None
        try:
            element = below.read_at(len(below.mirror.graph.nodes), made, at)
        except Unreadable:
            return None
        tensors = {load.tensor: below.tensors[load.tensor] for load in ix.loads(element)}
        if any(version.node.graph is below.mirror.graph for version in tensors.values()):
            return None
        if any(reader.tensors.get(name, version) != version for name, version in tensors.items()):
            return None
        reader.tensors.update(tensors)
        return element
