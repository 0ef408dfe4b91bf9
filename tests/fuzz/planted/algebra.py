"""Faults in masks as algebra, in sizes that are expressions, and in sinks that are no column."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
a pad is zeros
passes/recovering/reading/moving.py _padded; masks as algebra: F.pad with True masks what it adds
- argument(node, "value", 0) or 0
+ 0

a pad begins one later
passes/recovering/reading/moving.py _padded; masks as algebra: the first element of what is padded is the number around it
- ix.compare(">=", own[dim], ix.ZERO)
+ ix.compare(">=", own[dim], ix.ONE)

a flip is one off
passes/recovering/reading/moving.py _flipped; masks as algebra: the first element is read behind the last one
- ix.add(ix.add(extent, Const(-1)), at[dim], -1)
+ ix.add(extent, at[dim], -1)

a roll is one off
passes/recovering/reading/moving.py _rolled; masks as algebra: elements are moved by one less
- Const(-shift)
+ Const(1 - shift)

a triangle's diagonal is the first
passes/recovering/reading/pointwise.py _triangle; masks as algebra: tril(1) is tril
- Const(diagonal)
+ ix.ZERO

a filled diagonal is one off
passes/recovering/reading/in_place.py _fill_diagonal; masks as algebra: another diagonal is filled
- ix.compare("==", *at)
+ ix.compare("==", at[0], ix.add(at[1], ix.ONE))

a product of zeros and ones is a sum
passes/recovering/reading/pointwise.py _product; masks as algebra: an einsum of two masks allows what one of them does
- ix.apply("and", ix.as_bool(a), ix.as_bool(b))
+ ix.apply("or", ix.as_bool(a), ix.as_bool(b))

a sum along an axis goes beyond it
passes/recovering/reading/scattered.py somewhere; masks as algebra: an index is found that the list has not
- ix.compare("<", at, extent)
+ ix.TRUE

what is put forgets what was there
passes/recovering/reading/scattered.py _written; masks as algebra: elements that no index reaches are the first one
- reader.read(source, at)
+ reader.read(source, (ix.ZERO,) * len(at))

quotients forget what is added
torch_private/symbols.py _quotient; sizes: (s + 1) // 2 and s // 2 are one size
- out + part // by, rest + part % by
+ out + part // by, rest

a number as a sink has the other sign
passes/matching/patterns/shares.py _leaf; sinks: sigmoid(lse - 0.5) is sigmoid(lse + 0.5)
- self._symbol(number / beside.power, number / beside.power)
+ self._symbol(number / beside.power, -number / beside.power)

a sink is lost behind exponentials
passes/matching/patterns/sinks.py behind; sinks: exponentials and a sink are divided by their own sum
- logits = None if logits == -math.inf else logits
+ logits = None
""")
