"""One element of a mirror node as an index expression: `of(mirror).read(node, indices)`, on demand and remembered.

Each op has one line in a READERS table of this package. What can't be looked into is a load: an element of that very tensor at
those indices, which is true of any tensor. So reading never guesses; at worst it says little.
"""

from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.reading import in_place, making, moving, pointwise, scans, vmap
from attn_compiler.passes.reading.core import Reader, ReadOp, Unreadable, size
from attn_compiler.passes.reading.inputs import BodyInputs
from attn_compiler.passes.unit import Unit

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
    return Reader(mirror, READERS)


def of_unit(unit: Unit) -> Reader:
    """The one reader of a unit, which goes on from the inputs of a body to where it is called."""
    if unit.reader is None:
        inputs = BodyInputs(unit.calls, of_unit) if unit.calls else None
        unit.reader = Reader(unit.mirrored(), READERS, inputs)
    return unit.reader


__all__ = ["READERS", "Reader", "Unreadable", "of", "of_unit", "size"]
