"""One element of a mirror node as an index expression: `of(mirror).read(node, indices)`, on demand and cached.

Each op has one line in a READERS table of this package. A tensor that can't be read is a load: an element of that very tensor at
those indices, which is always true. So reading never guesses; at worst it says little.
"""

from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.recovering.reading import in_place, inside, making, moving, pointwise, scans, scattered, vmap
from attn_compiler.passes.recovering.reading.core import Reader, ReadOp, Unreadable
from attn_compiler.passes.recovering.reading.nodes import fake, size

#: ATen op -> rule that reads an element of its result
READERS: dict[object, ReadOp] = {
    **making.READERS,
    **pointwise.READERS,
    **in_place.READERS,
    **moving.READERS,
    **scans.READERS,
    **scattered.READERS,
    **vmap.READERS,
}


def of(mirror: Mirror) -> Reader:
    """A reader of one mirror's nodes."""
    return Reader(mirror, READERS, inside.reached)


__all__ = ["READERS", "Reader", "Unreadable", "fake", "of", "size"]
