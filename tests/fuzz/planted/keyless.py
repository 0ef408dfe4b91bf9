"""Faults in what queries without keys get."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
a row without keys is the kernel's
passes/writing/keyless_nodes.py completed; rows without keys: it is 0, and not the mean of v
- emitter.call(torch.where, has_keys, out, rows)
+ out

rows with keys are the mean, too, where a diagonal ends before their first key
passes/writing/keyless_nodes.py _by_condition; rows without keys: the last key that padding leaves decides
- emitter.call(torch.amin, first, -1, True)
+ emitter.call(torch.amax, first, -1, True)

a diagonal ends a key later
passes/writing/keyless_nodes.py _by_condition; rows without keys: a row with one key counts as one without
- emitter.call(torch.le, first, places.number(last))
+ emitter.call(torch.lt, first, places.number(last))

queries that are shut out have keys
passes/writing/keyless_nodes.py _by_condition; rows without keys: what a condition on queries leaves out is not asked
- own if found is None else emitter.call(torch.logical_and, own, found)
+ own if found is None else found

any pair decides for all queries
passes/writing/keyless_nodes.py _by_tensor; rows without keys: another axis is asked for keys
- return emitter.call(torch.any, _as_four(emitter, mask), -1, True)
+ return emitter.call(torch.any, _as_four(emitter, mask), -2, True)

the mean is a sum
passes/writing/keyless_nodes.py _mean; rows without keys: keys are added up
- else torch.mean
+ else torch.sum

the mean of heads in another order
passes/writing/keyless_nodes.py _for_each_head; rows without keys: query heads get the mean of another head of v
- emitter.call(torch.repeat_interleave, x, heads_q // heads_kv, 1)
+ emitter.call(torch.Tensor.repeat, x, 1, heads_q // heads_kv, 1, 1)

scores have no gradient in rows without keys
passes/recovering/keyless.py _outcome; rows without keys: where a number was added, q and k get no gradient
- is_added and not step.replaces
+ False

every query may use the first key
passes/recovering/keyless.py _has_keys; rows without keys: no row is taken for one without keys
- return any(_holds(ix.decide(ix.substitute(allowed, K, place), within)) for place in places)
+ return True

a number that replaces is added
passes/recovering/keyless.py _numbers; rows without keys: what two masks leave is another number
- masked = Const(fill) if step.replaces else ix.add(total, Const(fill))
+ masked = ix.add(total, Const(fill))

a step of decoding leaves a row without keys alone
passes/writing/keyless_nodes.py asked_for; rows without keys: the kernel for decoding gives 0
- (through or lowering in OF_CACHE)
+ through
""")
