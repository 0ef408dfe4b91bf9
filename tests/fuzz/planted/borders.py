"""Faults in what is known of a mask that another graph made."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
writes to a known mask are not looked for
torch_private/known_masks.py is_of; masks known: it means what it meant before the write
-             and (not self.watched or torch_writes.is_unwritten(tensor))

a known mask may lie in other strides
torch_private/known_masks.py is_of; masks known: transposed, it means what it did
-             and self.strides == tensor.stride()

a known mask may lie somewhere else
torch_private/known_masks.py is_of; masks known: other data means what the first did
-             and (not self.watched or torch_writes.is_unwritten(tensor))
-             and self.writes == tensor._version
-             and self.address == torch_writes.address(tensor)

who reads a mask makes it known again
torch_private/known_masks.py _begin_to_read; masks known: a written mask means what it did, from the second graph on
- tensor is not None and entry.is_of(tensor)
+ tensor is not None
""")
