"""Faults in index expressions, and in the kinds of masks and scores that are recognised in them."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
a test is divided upwards
index_expr/building.py test; index expressions: 2q - 2k + 1 >= 0 is q - k + 1 >= 0
- form.const // divisor)
+ -(-form.const // divisor))

an inverted test keeps its edge
index_expr/building.py _inverse; index expressions: not (k <= q) has the diagonal, too
- combine(Linear((), -1), form, -1)
+ combine(Linear(()), form, -1)

de Morgan halfway
index_expr/building.py _inverse; index expressions: not (a and b) is neither
- return apply("or", *map(invert, args))
+ return apply("and", *map(invert, args))

linear forms subtract twice
index_expr/linear_forms.py combine; index expressions: i - (j + 1) is i - j + 1
- a.const + factor * b.const
+ a.const + abs(factor) * b.const

a choice of bools
index_expr/building.py _where_bools; index expressions: c ? a : b is a where c, and b anywhere
- apply("and", invert(condition), b))
+ b)

a choice between FALSE and b
index_expr/building.py _where_bools; index expressions: c ? no : b is b where c
- return apply("and", invert(condition), b)
+ return apply("and", condition, b)

less is at most
index_expr/comparing.py compare; index expressions: i < j has the diagonal
- test(">=", combine(combine(y, x, -1), Linear((), 1), -1))
+ test(">=", combine(y, x, -1))

floats are compared upwards
index_expr/comparing.py _comparison_of_whole; index expressions: i <= 0.5 is i <= 1
- math.floor(b.value) if op in ("<=", ">") else math.ceil(b.value)
+ math.ceil(b.value) if op in ("<=", ">") else math.floor(b.value)

comparisons that are turned stay as they are
index_expr/comparing.py; index expressions: 0.5 <= i is read as i <= 0.5
- "<=": ">=", "<": ">"
+ "<=": "<=", "<": "<"

of two bounds the weaker
index_expr/junctions.py strongest; index expressions: k <= q and k <= q + 3 is the second
- choose = min if op == "and" else max
+ choose = max if op == "and" else min

implied parts of the other junction
index_expr/junctions.py without_implied; index expressions: a and (b or c) is a
- is_other(op, part) and not known.isdisjoint([arg.facts.digest for arg in joined(op, part)])
+ is_other(op, part)

xor with a truth value
index_expr/building.py _xor; index expressions: a xor False is not a
- return invert(a) if b.value else a
+ return a if b.value else invert(a)

a quotient is carried out too early
index_expr/dividing.py _divided; index expressions: (2q + k) // 2 is q for k = 2
- low is None or high is None or low < 0 or high >= divisor
+ low is None or high is None or low < 0 or high > divisor

a lower bound of a difference
index_expr/ranges.py _decided; index expressions: k - 5 >= 0 never holds for 6 keys
- FALSE if high is not None and high < 0 else None
+ FALSE if high is not None and high <= 0 else None

comparisons hold too early
index_expr/ranges.py _decided; index expressions: k >= 1 holds everywhere
- if low is not None and low >= 0:
+ if low is not None and low >= -1:

equal numbers are apart
index_expr/ranges.py _decided; index expressions: k = 0 never holds
- (low is not None and low > 0)
+ (low is not None and low >= 0)

bounds of a rest
index_expr/ranges.py; index expressions: i % 2 is always 0
- return 0, divisor - 1
+ return 0, divisor - 2

a load is what it is tested for elsewhere
index_expr/building.py _settled; index expressions: m = 1 ? 0 : m is m = 1 ? 0 : 1
- condition if holds else inverse
+ condition

a choice of choices
index_expr/building.py where; index expressions: a nested choice takes the other side
- inner, other = (b.args[0], b.args[2]) if b.args[1] == a else (invert(b.args[0]), b.args[1])
+ inner, other = (b.args[0], b.args[2]) if b.args[1] == a else (b.args[0], b.args[1])

a whole number that is rounded is exact
index_expr/looking.py _rounds; rounding: rounded numbers prove a mask
- return x.op != "mul" or x.args[1] != Const(-1)
+ return False

a load is renamed twice
index_expr/changing.py rename; index expressions: where one tensor's new name is another one's old name, the other tensor is read
- if isinstance(part, Load) and isinstance(rebuilt, Load):
+ if isinstance(rebuilt, Load):

any offset is causal
passes/recovering/kinds.py _causal; mask kinds: k <= q + 1 is causal
- if rest == Linear(()):
+ if not rest.terms and rest.const in (0, 1):

a difference of sizes is causal
passes/recovering/kinds.py _causal; mask kinds: k <= q + 2 is causal
- return masks.CausalFrom(offset=_plain(rest))
+ return masks.Causal()

a window is one wider
passes/recovering/kinds.py _window; mask kinds (triton): one key more is allowed
- masks.SlidingWindow(left=rest.const, right=None)
+ masks.SlidingWindow(left=rest.const + 1, right=None)

a band is one-sided
passes/recovering/kinds.py _band; mask kinds (triton): keys after the query are allowed
- masks.SlidingWindow(left=width, right=width)
+ masks.SlidingWindow(left=width, right=None)

a bound is one off
passes/recovering/kinds.py _key_bound; mask kinds (triton): one key more is allowed
- masks.KeyBound(side="last", bound=_plain(last))
+ masks.KeyBound(side="last", bound=_plain(ix.combine(last, Linear((), 1), 1)))

chunks start at 0
passes/recovering/kinds.py _chunked; mask kinds (triton): chunks begin elsewhere
- start=_plain(ix.combine(Linear(()), start, -1))
+ start=ix.ZERO

documents of other conditions
passes/recovering/kinds.py document; mask kinds (triton): an equation of two tensors is one of documents
- ix.substitute(key, K, Q) == query and any(ix.loads(key))
+ any(ix.loads(key))

a prefix is one short
passes/recovering/kinds.py _prefix; mask kinds (triton): the last key of the prefix is shut out
- ix.add(bounds[0], ix.ONE)
+ bounds[0]

a window is as wide ahead as back
passes/recovering/kinds.py _joined; mask kinds: queries see other keys ahead
- right=right[0][1]
+ right=left[0].left

what is added masks from -9000 on
passes/matching/patterns/score_steps.py; fills: what may still win is shut out
- MASKED_BELOW = -65504.0
+ MASKED_BELOW = -9000.0

what is added lifts no fill
passes/spelling/fills.py shuts_out; fills: what is lifted again stays shut out
- highest + added.high + scores < added.low - scores - GONE
+ highest + scores < -scores - GONE

slopes lose their weight
passes/recovering/score_kinds.py _alibi; score kinds (triton): alpha=2 counts once
- slopes: Expr = Const(float(part.weight))
+ slopes: Expr = Const(1.0)

tables lose their weight
passes/recovering/score_kinds.py _relative; score kinds (triton): a table that is subtracted is added
- weight=part.weight
+ weight=1.0

a penalty changes its sign
passes/recovering/score_kinds.py _penalty; score kinds (triton): a penalty is a reward
- value, region = float(yes.value * part.weight)
+ value, region = float(-yes.value * part.weight)

a penalty where it is not
passes/recovering/score_kinds.py _penalty; score kinds (triton): the other pairs are punished
- condition, yes = ix.invert(condition), no
+ condition, yes = condition, no

two slopes are one
passes/recovering/score_kinds.py joined; score kinds (triton): of two slopes one is lost
- slopes=ix.add(known.slopes, kind.slopes)
+ slopes=kind.slopes
""")
