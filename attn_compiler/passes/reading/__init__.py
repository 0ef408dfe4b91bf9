"""One element of a mirror node as an index expression: `of(mirror).read(node, indices)`, on demand and remembered.

Each op has one line in a READERS table of this package. What can't be looked into is a load: an element of that very tensor at
those indices, which is true of any tensor. So reading never guesses; at worst it says little.
"""

from attn_compiler.passes.mirror import Mirror
from attn_compiler.passes.reading import making, moving, pointwise, scans
from attn_compiler.passes.reading.core import Reader, ReadOp, Unreadable, size

#: the ATen op -> how an element of its result reads
READERS: dict[object, ReadOp] = {**making.READERS, **pointwise.READERS, **moving.READERS, **scans.READERS}


def of(mirror: Mirror) -> Reader:
    """A reader of one mirror's nodes."""
    return Reader(mirror, READERS)


__all__ = ["READERS", "Reader", "Unreadable", "of", "size"]
