"""One element of a mirror node as an index expression: `of(mirror).read(node, indices)`, on demand and remembered.

Each op has one line in a READERS table of this package. What can't be looked into is a load: an element of that very tensor at
those indices, which is true of any tensor. So reading never guesses; at worst it says little.
"""

from torch import fx

from attn_compiler.index_expr import Expr
from attn_compiler.passes.graph.mirror import Mirror, opaque
from attn_compiler.passes.graph.unit import Unit
from attn_compiler.passes.recovering.reading import in_place, inside, making, moving, pointwise, scans, vmap
from attn_compiler.passes.recovering.reading.borders import BorderInputs
from attn_compiler.passes.recovering.reading.core import At, Reader, ReadOp, Unreadable
from attn_compiler.passes.recovering.reading.inputs import BodyInputs
from attn_compiler.passes.recovering.reading.nodes import fake, size
from attn_compiler.passes.recovering.reading.outputs import BodyOutputs

#: the ATen op -> how an element of its result reads
READERS: dict[object, ReadOp] = {
    **making.READERS,
    **pointwise.READERS,
    **in_place.READERS,
    **moving.READERS,
    **scans.READERS,
    **vmap.READERS,
}


def of(mirror: Mirror) -> Reader:
    """A reader of one mirror's nodes."""
    return Reader(mirror, READERS, inside.reached)


def of_unit(unit: Unit) -> Reader:
    """The one reader of a unit, which goes on from the inputs to where they come from, and from results into bodies."""
    if unit.reader is None:
        inputs = BodyInputs(unit.calls, of_unit) if unit.is_body else BorderInputs(unit)
        unit.reader = Reader(
            unit.mirrored(), {**READERS, opaque: _results_of_calls(unit)}, inside.reached, inputs, longer=unit.longer
        )
    return unit.reader


def _results_of_calls(unit: Unit) -> ReadOp:
    outputs, other = BodyOutputs(unit, of_unit), READERS[opaque]

    def read(reader: Reader, node: fx.Node, at: At) -> Expr | None:
        found = outputs.element(reader, node, at)
        return found if found is not None else other(reader, node, at)

    return read


__all__ = ["READERS", "Reader", "Unreadable", "fake", "of", "of_unit", "size"]
