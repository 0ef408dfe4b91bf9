"""Faults in how views are followed and products are read."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
swapped axes of transpose are left
passes/graph/views.py _swapped; views: a transposed operand is read as it was
- order[i], order[j] = order[j], order[i]
+ order[i], order[j] = order[i], order[j]

mT swaps the first two
passes/graph/views.py _last_two; views: batch and heads are exchanged
- _swapped(rank, -1, -2)
+ _swapped(rank, 0, 1)

permute the other way round
passes/graph/views.py _permuted; views: cycles of three axes are turned backwards
- tuple(dims[i] for i in PERMUTES[node.target](node, len(dims)))
+ tuple(dims[PERMUTES[node.target](node, len(dims)).index(i)] for i in range(len(dims)))

unsqueeze one too early
passes/graph/views.py _unsqueeze; views: the new axis stands before another one
- (*dims[:at], (), *dims[at:])
+ (*dims[: max(at - 1, 0)], (), *dims[max(at - 1, 0) :])

repeat_interleave tiles
passes/graph/views.py _repeat_interleave; views: query heads read other kv heads
- (*dims[at], Atom(axes.size_expr(times), broadcast=True))
+ (Atom(axes.size_expr(times), broadcast=True), *dims[at])

repeat interleaves
passes/graph/views.py _tiled; views: query heads read other kv heads
- (Atom(size, broadcast=True), *dim)
+ (*dim, Atom(size, broadcast=True))

a slice is a view
passes/graph/views.py _whole; views: a part of a tensor is read as the whole
- not same_shape or before.dtype
+ before.dtype

a cast is a view
passes/graph/views.py _whole; views: what was rounded is read unrounded
- before.dtype != after.dtype or

scores may stop a gradient
passes/matching/match.py _require_rewritable; gradients: a gradient that the model stopped comes back
- if stopped is not None:
+ if False:

flip is a view
passes/graph/views.py; views: elements come in another order
-     aten.unsqueeze.default: _unsqueeze,
+     aten.unsqueeze.default: _unsqueeze,
+     aten.flip.default: lambda _, dims: dims,

split puts the inner part first
passes/graph/axes.py split; views: heads and head dim are exchanged
- self.parts = (Atom(outer, broadcast=self.broadcast), Atom(inner, broadcast=self.broadcast))
+ self.parts = (Atom(inner, broadcast=self.broadcast), Atom(outer, broadcast=self.broadcast))

new axes of expand stand last
passes/graph/axes.py expand; views: broadcast axes are aligned from the left
- [()] * (len(sizes) - len(dims)) + list(dims)
+ list(dims) + [()] * (len(sizes) - len(dims))

arrange drops the permutation
passes/graph/arrange.py arrange; arrange: axes of three or five dimensions stay where they were
- if order != sorted(order):
+ if order != sorted(order) and len(order) == 4:

arrange permutes backwards
passes/graph/arrange.py _permutation; arrange: cycles of axes are turned backwards
- args=(tuple(order),)
+ args=(tuple(order.index(i) for i in range(len(order))),)

arrange broadcasts at the end
passes/graph/arrange.py _insert_broadcasts; arrange: a shared axis stands before another one
- ViewCall(function=torch.unsqueeze, args=(index,))
+ ViewCall(function=torch.unsqueeze, args=(len(sizes) and index - 1,))

undone views of other axes
passes/graph/arrange.py _undoes; arrange: an axis of size one moves
- return first.args == second.args
+ return True

unflatten is undone by any flatten
passes/graph/arrange.py _undoes; arrange: dimensions are merged that were not
- return bool(second.args == (dim, dim + len(sizes) - 1))
+ return True

einsum's left term twice
passes/matching/contraction.py _einsum; contractions: k's axes are taken in the order of the alphabet
- lhs_labels=left, rhs_labels=right
+ lhs_labels=left, rhs_labels=tuple(sorted(right))

einsum's output sorted
passes/matching/contraction.py _einsum; contractions: the scores' axes are taken in another order
- out_labels=out)
+ out_labels=tuple(sorted(out)))

baddbmm without beta
passes/matching/contraction.py _with_addend; contractions: the addend is not scaled
- beta=beta)
+ beta=1.0)

baddbmm without alpha
passes/matching/contraction.py _with_addend; contractions: the scores are not scaled
- alpha=alpha,
+ alpha=1.0,

baddbmm reads with beta 0
passes/matching/contraction.py _with_addend; contractions: what is added is left out
- addend if beta != 0 else None
+ addend if beta != 0.5 else None

a label that is summed by itself
passes/matching/contraction.py _einsum; contractions: what einsum sums is left out
- if (set(left) ^ set(right)) - set(out):
+ if False:

matmul's rows and columns
passes/matching/contraction.py _matmul; contractions: k is read transposed
- rhs_labels=(*batch[rank - right :], d, n)
+ rhs_labels=(*batch[rank - right :], n, d)

a product of the weights may add
passes/matching/patterns/weights_chain.py to_values; contractions: what the second product adds or scales gets lost
- (product.addend, product.alpha) == (None, 1.0)
+ True

a part of the weights is all of them
passes/matching/patterns/weights_chain.py follow; near misses: the product with v has other queries than were asked for
- raise AxisError(f"{node.name} takes a part of the weights")
+ pass

softmax over any free axis
passes/matching/patterns/score_chain.py softmax_axis; near misses: a softmax over the queries counts as one over the keys
- key = axes.resolve(scores.dims[dim])
+ key = axes.resolve(scores.dims[-1])
""")
