"""Faults in what ranks that share a sequence refuse. Programs of one process reach none of them: `tests/fuzz/ranks_recall.py` has these."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
an op may work along the sequence
passes/graph/axis_rules.py along_dim; ranks: a mean over the rank's own positions is taken for that over all
- if any(has(context, dims[i]) for i in which):
+ if False:

a slice may take some positions
passes/graph/axis_rules.py slice_; ranks: the last position of a rank is not the last one
- same(context, node) if whole else along_dim(context, node)
+ same(context, node)

positions that are not the sequence's meet it
passes/context_parallel/places.py cannot_meet; ranks: every rank counts its positions from 0
- if not whole and (place.is_uniform or place.is_repeated):
+ if not axis_rules.has(self, dim):

numbers are not compared with those of the whole sequence
passes/context_parallel/compared.py _check_numbers; ranks: a number of the rank's length is one of the model
- if not is_size or (
+ if False and (

what was made of positions is no number of the rank
passes/context_parallel/following.py _counted; ranks: a count of the rank's positions is one of all
- is_counted = not held and bool(longer or counted)
+ is_counted = False

what is counted may be repeated
passes/context_parallel/following.py is_counted; ranks: a count that meets positions is taken as it is
- place.is_counted and not (place.is_uniform or place.is_repeated)
+ False

a table may be read by how often an index comes
passes/context_parallel/ops.py unknown; ranks: an argument that counts positions is taken as it is
- if not is_default and not (
+ if False and not (

a view that splits the sequence is followed
passes/graph/views.py forward_whole; ranks: every so many positions are taken for all of them
- if any(atom in copies and copies[atom].parts is not None for atom in whole):
-         return None
+ own |= {copies[atom].parts[0]: atom for atom in whole if atom in copies and copies[atom].parts is not None}
""")
