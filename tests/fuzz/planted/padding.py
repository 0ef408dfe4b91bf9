"""Faults in how padding is left out."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
an op may work along rows or positions
passes/graph/axis_rules.py along_dim; padded batches: a sum goes on from row to row
- which = views.named_axes(node, rank, "dims" if node.target is aten.flip.default else "dim")
+ which = views.named_axes(node, rank, "dims" if node.target is aten.flip.default else "dim") - {1}

what is added to zeros is zero
passes/unpad/rules.py number_at_padding; padded batches: a sum leaves out what padding holds by then
- if node.target in _PRODUCTS:
+ if rule is axis_rules.pointwise:

a table may count tokens
passes/unpad/rules.py _require; padded batches: gradients are scaled by how often a real token occurs
- and views.argument(node, "scale_grad_by_freq"):
+ and False:

a sum may be of any numbers
passes/unpad/exits.py _sum; padded batches: what padding holds is left out
- if value.packed is None or value.at_padding != 0:
+ if value.packed is None:

nobody asks whether the first token is real
passes/unpad/exits.py _one_position; padded batches: where padding is on the left another token is given
- Exit(returned=returned, fact=RuntimeFact(words=words, needs=(), holds=holds))
+ Exit(returned=returned)

nobody asks whether labels at padding count
passes/unpad/exits.py _cross_entropy; padded batches: their losses are left out
- Exit(returned=forms.call(node, given_as), fact=fact)
+ Exit(returned=forms.call(node, given_as))

windows go over gaps
passes/unpad/analysis.py _attention; padded batches: tokens are nearer to each other where padding was between them
- if pairs.count_positions:
+ if False:

a second mask is the first
passes/unpad/masks.py padding_and_pairs; padded batches: what the second attention leaves out is not asked
- if found is not None and (padding.tensor, padding.negated) != (found.tensor, found.negated):
+ if False:

a mask of padding is one of real tokens
passes/unpad/facts.py graph; padded batches: padding is computed, and real tokens are not
- (torch.eq, 0) if padding.negated else (torch.ne, 0)
+ (torch.ne, 0)

the last token is the next row's first
passes/unpad/making.py row_ends; padded batches: a row ends one token late
- self.call(torch.sub, ends, 1)
+ self.call(torch.sub, ends, 0)

a diagonal is one off
passes/unpad/making.py _mask; padded batches: a token does not see itself
- (torch.ge, 0 if band.causal else band.right)
+ (torch.ge, -1 if band.causal else band.right)

tokens see those of rows before theirs
passes/unpad/making.py _same_row; padded batches: attention is not kept within a row
- return self.call(torch.logical_and, after, before)
+ return before

rows and positions of what is given back change places
passes/unpad/indexing.py unpacked; padded batches: what was transposed is unpacked otherwise
- rows = x if (i, j) == (0, 1) else maker.call(aten.movedim.intlist, x, [i, j], [0, 1])
+ rows = x if (i, j) == (0, 1) else maker.call(aten.movedim.intlist, x, [j, i], [0, 1])

rows and positions may come in another order
passes/unpad/forms.py _require_same_order; padded batches: tokens meet numbers of other tokens
- if is_tagged(context, of_operand) and tags(context, of_operand) != tags(context, of_result):
+ if False:
""")
