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
passes/context_parallel/compared.py compare; ranks: a number of the rank's length is one of the model
- _check_numbers(own, other, cp.size, wholes)
+ _check_numbers(own, own, cp.size, {**wholes, own: own})

what was made of positions is no number of the rank
passes/context_parallel/following.py _counted; ranks: a count of the rank's positions is one of all
- is_counted = not held and bool(longer or counted)
+ is_counted = False

what is counted may be repeated
passes/context_parallel/following.py is_counted; ranks: a count that meets positions is taken as it is
- place.is_counted and not (place.is_uniform or place.is_repeated)
+ False

a table may be read by how often an index comes
passes/context_parallel/arguments.py unknown; ranks: an argument that counts positions is taken as it is
- if not is_default and not (
+ if False and not (

the whole sequence is split like a rank's
passes/graph/axis_rules.py view; ranks: rows and positions are mixed
- Mixed(why=f"it splits {context.words}") if found is None else Axes(dims=found)
+ same(context, node) if found is None else Axes(dims=found)
""")
