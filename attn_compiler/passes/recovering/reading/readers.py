"""One reader for each graph of a compilation. It follows inputs to their origins, and results into bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from attn_compiler.index_expr import Expr
from attn_compiler.passes.graph import mirroring
from attn_compiler.passes.graph.mirror import opaque
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.recovering.reading import READERS, inside
from attn_compiler.passes.recovering.reading.borders import BorderInputs
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp
from attn_compiler.passes.recovering.reading.inputs import BodyInputs
from attn_compiler.passes.recovering.reading.outputs import BodyOutputs
from attn_compiler.torch_private.known_masks import Known


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
        outputs, other = BodyOutputs(unit, self.of), READERS[opaque]

        def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
            found = outputs.element(reader, node, at)
            return found if found is not None else other(reader, node, at)

        return read
