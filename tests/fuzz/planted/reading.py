"""Faults in how masks and biases are read: elements, versions, expressions, kinds."""

from tests.fuzz.planted.fault import Fault


def _f(name: str, file: str, within: str | None, old: str, new: str, rule: str, why: str) -> Fault:
    return Fault(name=name, file=file, within=within, old=old, new=new, rule=rule, why=why)


def _r(name: str, file: str, *more: str | None) -> Fault:
    within, old, new, rule, why = more
    return _f(name, f"passes/reading/{file}", within, str(old), str(new), str(rule), str(why))


READING = [
    _r("arange without its start", "making.py", "_arange", "return ix.add(first, ix.mul(at[0], Const(step)))", "return ix.mul(at[0], Const(step))", "masks", "positions begin at 0"),
    _r("ones are zeros", "making.py", "_fill", "1 if \"ones\" in name", "1 if \"one_s\" in name", "masks", "a mask of ones is empty"),
    _r("a clone is written with its source", "making.py", "_copied", "return _same(reader, node, at)", "return reader.read_at(len(reader.mirror.graph.nodes), node.args[0], at)", "masks written", "a copy is read as its source is in the end"),
    _r("unsqueeze reads the wrong index", "moving.py", "_unsqueeze", "at[:dim] + at[dim + 1 :]", "at[: dim - 1] + at[dim:] if dim else at[1:]", "masks", "the query is read for the key"),
    _r("permuted backwards", "moving.py", "_permuted", "own[dim] = at[position]", "own[position] = at[dim]", "masks", "cycles of axes are turned backwards"),
    _r("a transpose reads as it is", "moving.py", "transposed", "swapped[i], swapped[j] = swapped[j], swapped[i]", "swapped[i], swapped[j] = swapped[i], swapped[j]", "masks", "rows are read as columns"),
    _r("slices begin at 0", "moving.py", "_slice", "ix.add(first, ix.mul(at[dim], Const(step)))", "ix.mul(at[dim], Const(step))", "masks", "a window of a mask is its beginning"),
    _r("slices have no step", "moving.py", "_slice", "ix.mul(at[dim], Const(step))", "at[dim]", "masks", "every second key is every key"),
    _r("select picks the first", "moving.py", "_select", "Const(index)", "Const(0)", "masks", "another row is read"),
    _r("cat's parts in the other order", "moving.py", "_joined", "ix.compare(\"<\", at[dim], Const(start))", "ix.compare(\"<=\", at[dim], Const(start))", "masks", "the first element of a part is the last of the one before"),
    _r("cat's parts begin at 0", "moving.py", "_joined", "Const(-start)", "Const(0)", "masks", "a part is read beyond its end"),
    _r("repeat_interleave as repeat", "moving.py", "_repeated_in_place", "ix.apply(\"floordiv\", at[dim], Const(times))", "ix.apply(\"mod\", at[dim], Const(times))", "masks", "elements come in another order"),
    _r("repeat as repeat_interleave", "moving.py", "_within", "ix.apply(\"mod\", i, Const(int(size)))", "ix.apply(\"floordiv\", i, Const(int(size)))", "masks", "elements come in another order"),
    _r("a reshape splits the other way", "moving.py", "_unflattened", "ix.apply(\"mod\", position, Const(int(extent)))", "ix.apply(\"floordiv\", position, Const(int(extent)))", "masks", "rows and columns are mixed up"),
    _r("a reshape merges the other way", "moving.py", "_flattened", "ix.add(ix.mul(total, Const(int(extent))), index)", "ix.add(ix.mul(index, Const(int(extent))), total)", "masks", "rows and columns are mixed up"),
    _r("an index may be negative", "moving.py", "_indexed", "if all((lowest := ix.lower_bound(i)) is not None and lowest >= 0 for i in read):", "if True:", "masks", "x[-1] is read as an element before the first"),
    _r("gather and index_select are one", "moving.py", "_picked", "at if node.target is aten.gather.default else (at[dim],)[: fake(indices).dim()]", "at if node.target is not aten.gather.default else (ix.ZERO, *at[1:])", "masks", "another row of the index is read"),
    _r("expand reads every element", "moving.py", "_expanded", "broadcast(fake(source), at)", "at[len(at) - fake(source).dim() :]", "masks", "a broadcast element is read beyond its axis"),
    _r("broadcasting from the left", "core.py", "broadcast", "own = at[len(at) - value.dim() :]", "own = at[: value.dim()]", "masks", "a mask of the keys is one of the batch"),
    _r("a difference is a sum", "pointwise.py", "_subtract", "return ix.add(a, b, -1)", "return ix.add(a, b, 1)", "masks", "i - j is i + j"),
    _r("rsub is sub", "pointwise.py", None, "aten.rsub.Scalar: _arithmetic(lambda a, b: _subtract(b, a))", "aten.rsub.Scalar: _arithmetic(_subtract)", "masks", "1 - m is m - 1"),
    _r("tril keeps the diagonal's other side", "pointwise.py", "_triangle", "\"<=\" if keeps_lower else \">=\"", "\"<=\" if keeps_lower else \">\"", "masks", "triu loses its diagonal"),
    _r("tril loses its diagonal", "pointwise.py", "_triangle", "\"<=\" if keeps_lower", "\"<\" if keeps_lower", "masks", "a query does not see itself"),
    _r("triangles are transposed", "pointwise.py", "_triangle", "ix.add(at[-1], at[-2], -1)", "ix.add(at[-2], at[-1], -1)", "masks", "a query sees the keys after it"),
    _r("where the other way round", "pointwise.py", "_where", "ix.where(ix.as_bool(condition), a, b)", "ix.where(ix.as_bool(condition), b, a)", "masks", "a choice takes the other side"),
    _r("masked_fill fills the rest", "pointwise.py", "_masked_fill", "ix.where(ix.as_bool(mask), value, source)", "ix.where(ix.as_bool(mask), source, value)", "masks", "what is filled is what was kept"),
    _r("clamp's bounds are exchanged", "pointwise.py", "_clamp", "((\"min\", \"max\"), (\"max\", \"min\"))", "((\"min\", \"min\"), (\"max\", \"max\"))", "masks", "a position is clamped to a bound"),
    _r("truncated division is floored", "pointwise.py", "_floor_div", "argument(node, \"rounding_mode\") != \"floor\"", "argument(node, \"rounding_mode\") is None", "integers", "-1 / 2 is 0, and read as -1"),
    _r("remainders of negative divisors", "pointwise.py", "_remainder", "b.value > 0", "b.value != 0", "integers", "a rest by -3 has another sign"),
    _r("bitwise on whole numbers is logical", "pointwise.py", "_logical", "if bitwise and fake(node).dtype != torch.bool:", "if False:", "integers", "i ^ 1 is a truth value"),
    _r("xor is or", "pointwise.py", None, "aten.logical_xor.default: _logical(\"xor\")", "aten.logical_xor.default: _logical(\"or\")", "masks", "pairs that both allow stay allowed"),
    _r("le is lt", "pointwise.py", None, "((\"le\", \"<=\"),", "((\"le\", \"<\"),", "masks", "the diagonal is shut out"),
    _r("ne is eq", "pointwise.py", None, "(\"ne\", \"!=\"))", "(\"ne\", \"==\"))", "masks", "what is different is what is equal"),
    _r("cumsum begins at 0", "scans.py", "_running_sum", "ix.mul(ix.add(at[dim], ix.ONE), body)", "ix.mul(at[dim], body)", "masks", "a sum is one element short"),
    _r("diff's first element", "scans.py", "_difference", "ix.compare(\"==\", here, ix.ZERO)", "ix.compare(\"==\", here, ix.ONE)", "masks", "the first difference is another one"),
    _r("whole numbers never wrap", "converting.py", "fits", "return low is not None and high is not None and limits.min <= low and high <= limits.max", "return True", "integers", "what wraps in uint8 is read as unbounded"),
    _r("vmap's axis is the first", "vmap.py", "_axis", "axis.dim % fake(larger).dim()", "0", "masks", "a mapped axis stands elsewhere"),
    _r("a written element is what was before", "core.py", "_written", "ix.where(reached, value, before)", "ix.where(reached, before, before)", "masks written", "what is written to a part is not seen"),
    _r("a write reaches all", "inside.py", "reached", "(ix.apply(\"and\", above[0], own[0]), own[1])", "(above[0], own[1])", "masks written", "a write through a slice reaches every element"),
    _r("a slice that is written begins at 0", "inside.py", "_sliced", "past = ix.add(at[dim], first, -1)", "past = at[dim]", "masks written", "other rows are written"),
    _r("a slice that is written never ends", "inside.py", "_sliced", "ix.compare(\"<\", past, ix.mul(count, Const(step))),", "", "masks written", "rows after the slice are written, too"),
    _r("a slice that is written has no step", "inside.py", "_sliced", "ix.compare(\"==\", ix.apply(\"mod\", past, Const(step)), ix.ZERO),", "", "masks written", "every row is written for every second"),
    _r("a negative select", "inside.py", "_selected", "if index < 0 else ix.ZERO", "if index < -9 else ix.ZERO", "masks written", "the last row is not written"),
    _r("what is written is the last thing", "in_place.py", "_fill", "value = argument(node, \"value\", 0)", "value = 0", "masks written", "fill_(True) writes False"),
    _r("copy_ is no write", "in_place.py", None, "aten.copy_.default: _copy,", "aten.copy_.default: lambda reader, node, at: reader.read(node.args[0], at),", "masks written", "a copied mask is the one before"),
    _f("a version ends at its write", "passes/mutation.py", "version", "if mirror.order(writer) >= when:", "if mirror.order(writer) > when + 40:", "masks written", "a mask is read as it is later on"),
    _f("a version knows of no write", "passes/mutation.py", "version", "since = writer", "since = None", "masks written", "a mask is read as it was made"),
    _f("detached tensors have their own memory", "passes/mutation.py", "writers", "found.append((node, set().union(*map(storages, written))))", "found.append((node, set().union(*(storages(n) for n in written if n.op == \"placeholder\" or not n.name.startswith(\"detach\")))))", "roots", "a write through .data is not seen"),
]

EXPRESSIONS = [
    _f("a test is divided upwards", "index_expr/building.py", "test", "form.const // divisor)", "-(-form.const // divisor))", "index expressions", "2q - 2k + 1 >= 0 is q - k + 1 >= 0"),
    _f("an inverted test keeps its edge", "index_expr/building.py", "invert", "combine(Linear((), -1), form, -1)", "combine(Linear(()), form, -1)", "index expressions", "not (k <= q) has the diagonal, too"),
    _f("de Morgan halfway", "index_expr/building.py", "invert", "return apply(\"or\", *map(invert, args))", "return apply(\"and\", *map(invert, args))", "index expressions", "not (a and b) is neither"),
    _f("linear forms subtract twice", "index_expr/building.py", "combine", "a.const + factor * b.const", "a.const + abs(factor) * b.const", "index expressions", "i - (j + 1) is i - j + 1"),
    _f("a choice of bools", "index_expr/building.py", "_where_bools", "apply(\"and\", invert(condition), b))", "b)", "index expressions", "c ? a : b is a where c, and b anywhere"),
    _f("a choice between FALSE and b", "index_expr/building.py", "_where_bools", "return apply(\"and\", invert(condition), b)", "return apply(\"and\", condition, b)", "index expressions", "c ? no : b is b where c"),
    _f("less is at most", "index_expr/comparing.py", "compare", "test(\">=\", combine(combine(y, x, -1), Linear((), 1), -1))", "test(\">=\", combine(y, x, -1))", "index expressions", "i < j has the diagonal"),
    _f("floats are compared upwards", "index_expr/comparing.py", "_comparison_of_whole", "math.floor(b.value) if op in (\"<=\", \">\") else math.ceil(b.value)", "math.ceil(b.value) if op in (\"<=\", \">\") else math.floor(b.value)", "index expressions", "i <= 0.5 is i <= 1"),
    _f("comparisons that are turned", "index_expr/comparing.py", None, "\"<=\": \">=\", \"<\": \">\"", "\"<=\": \">\", \"<\": \">=\"", "index expressions", "0.5 <= i loses an edge"),
    _f("of two bounds the weaker", "index_expr/junctions.py", "strongest", "choose = min if op == \"and\" else max", "choose = max if op == \"and\" else min", "index expressions", "k <= q and k <= q + 3 is the second"),
    _f("implied parts of the other junction", "index_expr/junctions.py", "without_implied", "is_other(op, part) and any(arg in parts for arg in part.args)", "is_other(op, part)", "index expressions", "a and (b or c) is a"),
    _f("xor with a truth value", "index_expr/building.py", "_xor", "return invert(a) if b.value else a", "return a if b.value else invert(a)", "index expressions", "a xor False is not a"),
    _f("a quotient is carried out too early", "index_expr/dividing.py", "_divided", "low is None or high is None or low < 0 or high >= divisor", "low is None or high is None or low < 0 or high > divisor", "index expressions", "(2q + k) // 2 is q for k = 2"),
    _f("a lower bound of a difference", "index_expr/ranges.py", "_decided", "FALSE if high is not None and high < 0 else None", "FALSE if high is not None and high <= 0 else None", "index expressions", "k - 5 >= 0 never holds for 6 keys"),
    _f("comparisons hold too early", "index_expr/ranges.py", "_decided", "if low is not None and low >= 0:", "if low is not None and low >= -1:", "index expressions", "k >= 1 holds everywhere"),
    _f("equal numbers are apart", "index_expr/ranges.py", "_decided", "(low is not None and low > 0)", "(low is not None and low >= 0)", "index expressions", "k = 0 never holds"),
    _f("bounds of a rest", "index_expr/ranges.py", None, "return 0, divisor - 1", "return 0, divisor - 2", "index expressions", "i % 2 is always 0"),
    _f("a load is what it is tested for elsewhere", "index_expr/building.py", "_settled", "condition if holds else invert(condition)", "condition", "index expressions", "m = 1 ? 0 : m is m = 1 ? 0 : 1"),
    _f("a choice of choices", "index_expr/building.py", "where", "inner, other = (b.args[0], b.args[2]) if b.args[1] == a else (invert(b.args[0]), b.args[1])", "inner, other = (b.args[0], b.args[2]) if b.args[1] == a else (b.args[0], b.args[1])", "index expressions", "a nested choice takes the other side"),
    _f("a whole number that is rounded is exact", "index_expr/looking.py", "is_exact", "return x.op == \"mul\" and x.args[1] == Const(-1) and is_exact(x.args[0])", "return True", "rounding", "rounded numbers prove a mask"),
]

KINDS = [
    _f("any offset is causal", "passes/kinds.py", "_causal", "if rest == Linear(()):", "if not rest.terms and rest.const in (0, 1):", "mask kinds", "k <= q + 1 is causal"),
    _f("a difference of sizes is causal", "passes/kinds.py", "_causal", "return masks.CausalFrom(offset=_plain(rest))", "return masks.Causal()", "mask kinds", "k <= q + 2 is causal"),
    _f("a window is one wider", "passes/kinds.py", "_window", "masks.SlidingWindow(left=rest.const, right=None)", "masks.SlidingWindow(left=rest.const + 1, right=None)", "mask kinds (triton)", "one key more is allowed"),
    _f("a band is one-sided", "passes/kinds.py", "_band", "masks.SlidingWindow(left=width, right=width)", "masks.SlidingWindow(left=width, right=None)", "mask kinds (triton)", "keys after the query are allowed"),
    _f("a bound is one off", "passes/kinds.py", "_key_bound", "masks.KeyBound(side=\"last\", bound=_plain(last))", "masks.KeyBound(side=\"last\", bound=_plain(ix.combine(last, Linear((), 1), 1)))", "mask kinds (triton)", "one key more is allowed"),
    _f("chunks start at 0", "passes/kinds.py", "_chunked", "start=_plain(ix.combine(Linear(()), start, -1))", "start=ix.ZERO", "mask kinds (triton)", "chunks begin elsewhere"),
    _f("documents of other conditions", "passes/kinds.py", "_document", "ix.substitute(key, K, Q) == query and any(ix.loads(key))", "any(ix.loads(key))", "mask kinds (triton)", "an equation of two tensors is one of documents"),
    _f("a prefix is one short", "passes/kinds.py", "_prefix", "ix.add(bounds[0], ix.ONE)", "bounds[0]", "mask kinds (triton)", "the last key of the prefix is shut out"),
    _f("padding that asks the query", "passes/kinds.py", "_key_padding", "reads_keys and not _mentions(part, Q, H)", "reads_keys and not _mentions(part, H)", "mask kinds", "a condition on both is one on the key"),
    _f("-1e4 masks", "passes/patterns/score_steps.py", None, "MASKED_BELOW = -65504.0", "MASKED_BELOW = -9000.0", "fills", "what may still win is shut out"),
    _f("positive numbers mask, too", "passes/score_kinds.py", "split", "weight > 0 and value <= MASKED_BELOW", "value <= MASKED_BELOW", "fills", "s - mask shuts out what it lifts"),
    _f("slopes lose their weight", "passes/score_kinds.py", "_alibi", "slopes: Expr = Const(float(part.weight))", "slopes: Expr = Const(1.0)", "score kinds (triton)", "alpha=2 counts once"),
    _f("tables lose their weight", "passes/score_kinds.py", "_relative", "weight=part.weight", "weight=1.0", "score kinds (triton)", "a table that is subtracted is added"),
    _f("a penalty changes its sign", "passes/score_kinds.py", "_penalty", "value, region = float(yes.value * part.weight)", "value, region = float(-yes.value * part.weight)", "score kinds (triton)", "a penalty is a reward"),
    _f("a penalty where it is not", "passes/score_kinds.py", "_penalty", "condition, yes = ix.invert(condition), no", "condition, yes = condition, no", "score kinds (triton)", "the other pairs are punished"),
    _f("two slopes are one", "passes/score_kinds.py", "joined", "slopes=ix.add(known.slopes, kind.slopes)", "slopes=kind.slopes", "score kinds (triton)", "of two slopes one is lost"),
]

ALL = [*READING, *EXPRESSIONS, *KINDS]
