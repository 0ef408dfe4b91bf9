"""Faults in how the elements of masks and biases are read: ops, views, writes and versions."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
arange without its start
passes/recovering/reading/making.py _arange; masks: positions begin at 0
- found = ix.add(first, ix.mul(at[0], Const(step)))
+ found = ix.mul(at[0], Const(step))

ones are zeros
passes/recovering/reading/making.py _fill; masks: a mask of ones is empty
- 1 if "ones" in name
+ 0 if "ones" in name

a clone is written with its source
passes/recovering/reading/making.py _copied; masks written: a copy is read as its source is in the end
- return _same(reader, node, at)
+ return reader.read_at(len(reader.mirror.graph.nodes), node.args[0], at)

unsqueeze reads the wrong index
passes/recovering/reading/moving.py _unsqueezed; masks: the query is read for the key
- at[: dim % len(at)] + at[dim % len(at) + 1 :]
+ at[: (dim - 1) % len(at)] + at[dim % len(at) :] if dim % len(at) else at[1:]

permuted backwards
passes/recovering/reading/moving.py _permuted; masks: cycles of axes are turned backwards
- at[order.index(dim)] for dim in range(len(at))
+ at[dim] for dim in order

a transpose reads as it is
passes/recovering/reading/moving.py _permuted; masks: rows are read as columns
- tuple(at[order.index(dim)] for dim in range(len(at)))
+ at

slices begin at 0
passes/recovering/reading/moving.py _slice; masks: a window of a mask is its beginning
- ix.add(first, ix.mul(at[dim], Const(step)))
+ ix.mul(at[dim], Const(step))

slices have no step
passes/recovering/reading/moving.py _slice; masks: every second key is every key
- ix.mul(at[dim], Const(step))
+ at[dim]

select picks the first
passes/recovering/reading/moving.py _select; masks: another row is read
- Const(index)
+ Const(0)

cat's parts in the other order
passes/recovering/reading/moving.py _joined; masks: the first element of a part is the last of the one before
- ix.compare("<", at[dim], starts[i + 1])
+ ix.compare("<=", at[dim], starts[i + 1])

cat's parts begin at 0
passes/recovering/reading/moving.py _joined; masks: a part is read beyond its end
- ix.add(at[dim], starts[i], -1)
+ at[dim]

repeat_interleave as repeat
passes/recovering/reading/moving.py _repeated_in_place; masks: elements come in another order
- ix.apply("floordiv", at[dim], Const(times))
+ ix.apply("mod", at[dim], Const(times))

repeat as repeat_interleave
passes/recovering/reading/moving.py _within; masks: elements come in another order
- ix.apply("mod", i, Const(int(size)))
+ ix.apply("floordiv", i, Const(int(size)))

a reshape splits the other way
passes/recovering/reading/moving.py _unflattened; masks: rows and columns are mixed up
- ix.apply("mod", position, Const(int(extent)))
+ ix.apply("floordiv", position, Const(int(extent)))

a reshape merges the other way
passes/recovering/reading/moving.py _flattened; masks: rows and columns are mixed up
- ix.add(ix.mul(total, Const(int(extent))), index)
+ ix.add(ix.mul(index, Const(int(extent))), total)

an index may be negative
passes/recovering/reading/moving.py _indexed; masks: x[-1] is read as an element before the first
- if all((lowest := ix.lower_bound(i)) is not None and lowest >= 0 for i in read):
+ if True:

gather and index_select are one
passes/recovering/reading/moving.py _picked; masks: another row of the index is read
- at if node.target is aten.gather.default else (at[dim],)[: fake(indices).dim()]
+ at if node.target is not aten.gather.default else (ix.ZERO, *at[1:])

expand reads every element
passes/recovering/reading/moving.py _expanded; masks: a broadcast element is read beyond its axis
- broadcast(fake(source), at)
+ at[len(at) - fake(source).dim() :]

broadcasting from the left
passes/recovering/reading/core.py broadcast; masks: a mask of the keys is one of the batch
- own = at[len(at) - value.dim() :]
+ own = at[: value.dim()]

a difference is a sum
passes/recovering/reading/pointwise.py _subtract; masks: i - j is i + j
- return ix.add(a, b, -1)
+ return ix.add(a, b, 1)

rsub is sub
passes/recovering/reading/pointwise.py; masks: 1 - m is m - 1
- aten.rsub.Scalar: _arithmetic(lambda a, b: _subtract(b, a))
+ aten.rsub.Scalar: _arithmetic(_subtract)

tril keeps the diagonal's other side
passes/recovering/reading/pointwise.py _triangle; masks: triu loses its diagonal
- "<=" if keeps_lower else ">="
+ "<=" if keeps_lower else ">"

tril loses its diagonal
passes/recovering/reading/pointwise.py _triangle; masks: a query does not see itself
- "<=" if keeps_lower
+ "<" if keeps_lower

triangles are transposed
passes/recovering/reading/pointwise.py _triangle; masks: a query sees the keys after it
- ix.add(at[-1], at[-2], -1)
+ ix.add(at[-2], at[-1], -1)

where the other way round
passes/recovering/reading/pointwise.py _where; masks: a choice takes the other side
- ix.where(ix.as_bool(condition), a, b)
+ ix.where(ix.as_bool(condition), b, a)

masked_fill fills the rest
passes/recovering/reading/pointwise.py _masked_fill; masks: what is filled is what was kept
- ix.where(ix.as_bool(mask), value, source)
+ ix.where(ix.as_bool(mask), source, value)

clamp's bounds are exchanged
passes/recovering/reading/pointwise.py _clamp; masks: a position is clamped to a bound
- (("min", "max"), ("max", "min"))
+ (("min", "min"), ("max", "max"))

truncated division is floored
passes/recovering/reading/pointwise.py _floor_div; integers: -1 / 2 is 0, and read as -1
- argument(node, "rounding_mode") != "floor"
+ argument(node, "rounding_mode") is None

fmod is a remainder
passes/recovering/reading/pointwise.py; integers: the rest of a number below zero has another sign
- aten.remainder.Scalar: _pointwise(_remainder),
+ aten.remainder.Scalar: _pointwise(_remainder),
+     aten.fmod.Scalar: _pointwise(_remainder),

bitwise on whole numbers is logical
passes/recovering/reading/pointwise.py _logical; integers: i ^ 1 is a truth value
- if bitwise and fake(node).dtype != torch.bool:
+ if False:

xor is or
passes/recovering/reading/pointwise.py; masks: pairs that both allow stay allowed
- _logical(op) for op in ("and", "or", "xor")},
+ _logical(op.replace("x", "")) for op in ("and", "or", "xor")},

le is lt
passes/recovering/reading/pointwise.py; masks: the diagonal is shut out
- (("le", "<="),
+ (("le", "<"),

ne is eq
passes/recovering/reading/pointwise.py; masks: what is different is what is equal
- ("ne", "!="))
+ ("ne", "=="))

cumsum begins at 0
passes/recovering/reading/scans.py _running_sum; masks: a sum is one element short
- ix.mul(ix.add(at[dim], ix.ONE), Const(int(body.value)))
+ ix.mul(at[dim], Const(int(body.value)))

diff's first element
passes/recovering/reading/scans.py _difference; masks: the first difference is another one
- ix.compare("==", here, ix.ZERO)
+ ix.compare("==", here, ix.ONE)

whole numbers never wrap
passes/recovering/reading/converting.py fits; integers: what wraps in uint8 is read as unbounded
- return low is not None and high is not None and limits.min <= low and high <= limits.max
+ return True

vmap's axis is the first
passes/recovering/reading/vmap.py _axis; masks: a mapped axis stands elsewhere
- axis.dim % fake(larger).dim()
+ 0

a written element is what was before
passes/recovering/reading/core.py _written; masks written: what is written to a part is not seen
- ix.where(reached, value, before)
+ ix.where(reached, before, before)

a write reaches all
passes/recovering/reading/inside.py reached; masks written: a write through a slice reaches every element
- (ix.apply("and", above[0], own[0]), own[1])
+ (above[0], own[1])

a slice that is written begins at 0
passes/recovering/reading/inside.py _sliced; masks written: other rows are written
- past = ix.add(at[dim], first, -1)
+ past = at[dim]

a slice that is written never ends
passes/recovering/reading/inside.py _sliced; masks written: rows after the slice are written, too
- ix.compare("<", past, ix.mul(count, Const(step))),

a slice that is written has no step
passes/recovering/reading/inside.py _sliced; masks written: every row is written for every second
- ix.compare("==", ix.apply("mod", past, Const(step)), ix.ZERO),

a negative select
passes/recovering/reading/inside.py _selected; masks written: the last row is not written
- if index < 0 else ix.ZERO
+ if index < -9 else ix.ZERO

what is written is the last thing
passes/recovering/reading/in_place.py _fill; masks written: fill_(True) writes False
- value = argument(node, "value", 0)
+ value = 0

copy_ is no write
passes/recovering/reading/in_place.py; masks written: a copied mask is the one before
- _given(reader, node, argument(node, "src"), at),
+ reader.read(node.args[0], at),

a version ends at its write
passes/graph/mutation.py version; masks written: a mask is read as it is later on
- at = bisect.bisect_left(writers.places, when)
+ at = bisect.bisect_left(writers.places, when + 40)

a version knows of no write
passes/graph/mutation.py version; masks written: a mask is read as it was made
- since = writer
+ since = None

detached tensors have their own memory
passes/graph/mutation.py writers; roots: a write through .data is not seen
- found.append((node, set().union(*map(storages, written))))
+ found.append((node, set().union(*(storages(n) for n in written if n.op == "placeholder" or not n.name.startswith("detach")))))
""")
