"""Faults in what queries without keys get."""

from tests.fuzz.planted.fault import Fault


def _f(name: str, file: str, within: str, old: str, new: str, why: str) -> Fault:
    return Fault(name=name, file=f"passes/{file}", within=within, old=old, new=new, rule="rows without keys", why=why)


_NODES = "writing/keyless_nodes.py"
_FOUND = "recovering/keyless.py"

ALL = (
    _f(
        "a row without keys is the kernel's",
        _NODES,
        "completed",
        "emitter.call(torch.where, has_keys, out, rows)",
        "out",
        "it is 0, and not the mean of v",
    ),
    _f(
        "rows with keys are the mean, too, where a diagonal ends before their first key",
        _NODES,
        "_by_condition",
        "emitter.call(torch.amin, first, -1, True)",
        "emitter.call(torch.amax, first, -1, True)",
        "the last key that padding leaves decides",
    ),
    _f(
        "a diagonal ends a key later",
        _NODES,
        "_by_condition",
        "emitter.call(torch.le, first, places.number(last))",
        "emitter.call(torch.lt, first, places.number(last))",
        "a row with one key counts as one without",
    ),
    _f(
        "queries that are shut out have keys",
        _NODES,
        "_by_condition",
        "own if found is None else emitter.call(torch.logical_and, own, found)",
        "own if found is None else found",
        "what a condition on queries leaves out is not asked",
    ),
    _f(
        "any pair decides for all queries",
        _NODES,
        "_by_tensor",
        "return emitter.call(torch.any, mask, -1, True)",
        "return emitter.call(torch.any, mask, -2, True)",
        "another axis is asked for keys",
    ),
    _f(
        "the mean is a sum",
        _NODES,
        "_mean",
        "emitter.call(torch.mean, operands.v, 2, keepdim=True, dtype=wide)",
        "emitter.call(torch.sum, operands.v, 2, keepdim=True, dtype=wide)",
        "keys are added up",
    ),
    _f(
        "the mean of heads in another order",
        _NODES,
        "_for_each_head",
        "emitter.call(torch.repeat_interleave, x, heads_q // heads_kv, 1)",
        "emitter.call(torch.Tensor.repeat, x, 1, heads_q // heads_kv, 1, 1)",
        "query heads get the mean of another head of v",
    ),
    _f(
        "scores have no gradient in rows without keys",
        _FOUND,
        "_outcome",
        "is_added and not step.replaces",
        "False",
        "where a number was added, q and k get no gradient",
    ),
    _f(
        "every query may use the first key",
        _FOUND,
        "_has_keys",
        "return any(_holds(ix.decide(ix.substitute(allowed, K, place), within)) for place in places)",
        "return True",
        "no row is taken for one without keys",
    ),
    _f(
        "a number that replaces is added",
        _FOUND,
        "_outcome",
        "total = fill if step.replaces else number + fill",
        "total = number + fill",
        "what two masks leave is another number",
    ),
)
