"""Truth values over (query, key) by expressions of positions: comparisons, chunks, whole numbers that wrap, floats that are rounded."""

from __future__ import annotations

from tests.fuzz.grammar.draft import Draft


def positions(draft: Draft) -> None:
    """i: the queries' positions as a column, j: the keys'; n, m: how many."""
    if any(line.strip().startswith("n, m = ") for line in draft.lines):
        return
    draft.add("n, m = q.shape[2], k.shape[2]")
    if not draft.maybe(3):
        draft.add("i, j = torch.arange(n, device=q.device)[:, None], torch.arange(m, device=q.device)[None, :]")
        return
    draft.add(f"i, j = {_numbered(draft, 'n')}[:, None], {_numbered(draft, 'm')}[None, :]")


def _numbered(draft: Draft, size: str) -> str:
    """The whole numbers below a size, as models come to them: slices of what is longer, rows of a table, running sums, offsets."""
    plain = f"torch.arange({size}, device=q.device)"
    forms = [
        plain,
        f"(torch.arange(1, {size} + 1, device=q.device) - 1)",
        f"(torch.arange(3, {size} + 3, device=q.device) - 3)",
        f"(torch.arange(0, 2 * {size}, 2, device=q.device) // 2)",
        f"(torch.arange(2 * {size}, device=q.device)[::2] // 2)",
        f"(torch.arange(2 * {size} + 1, device=q.device)[1::2] // 2)",
        f"(torch.arange({size} + 2, device=q.device)[2:] - 2)",
        f"(torch.ones({size}, dtype=torch.int64, device=q.device).cumsum(0) - 1)",
        f"(torch.arange(2 * {size}, device=q.device).view({size}, 2)[:, 1] // 2)",
        f"(torch.arange(2 * {size}, device=q.device).view(2, {size}).select(0, 1) - {size})",
        f"torch.stack([{plain} + 1, {plain}])[1]",
        f"{plain}.repeat_interleave(2, 0)[::2]",
        f"{plain}.repeat_interleave(3, dim=0)[1::3]",
        f"{plain}.repeat(2)[{size}:]",
        f"{plain}.expand(3, {size})[2]",
        f"{plain}[{plain} - {size}]",
        f"{plain}.flip(0)[-{plain} - 1]",
        f"{plain}.roll(1)[({plain} + 1) % {size} - {size}]",
        f"torch.div({plain} * 2 + 1, 2, rounding_mode='floor')",
        f"-torch.div(-{plain} * 2 - 1, 2, rounding_mode='trunc')",
        f"({size} - 1 - {plain}.flip(0).flip(0)).flip(0)",
        f"(torch.full(({size},), 2, device=q.device).cumsum(0).sub(2) // 2)",
    ]
    return str(draft.pick(*forms))


# ---- expressions --------------------------------------------------------------------------------------------------------


def whole(draft: Draft, depth: int = 2) -> str:
    """A whole number for each pair, in int64."""
    if depth == 0:
        return str(draft.pick("i", "j", "(i - j)", "(j - i)", "(i + j)", "(i + 1)"))
    a = whole(draft, depth - 1)
    n = draft.number(1, 4)
    forms = [
        f"({a} * {draft.pick(2, 3, -1, -2)})",
        f"({a} + {draft.number(-3, 3)})",
        f"({a} // {n})",
        f"({a} % {n + 1})",
        f"({a}).abs()",
        f"torch.minimum({a}, {whole(draft, 0)})",
        f"torch.maximum({a}, {whole(draft, 0)})",
        f"({a}).clamp({draft.number(-2, 1)}, {draft.number(1, 4)})",
        f"(-{a})",
        f"({a} - {whole(draft, 0)})",
        f"({a} * {whole(draft, 0)})",
        f"torch.where({compared(draft, 0)}, {a}, {whole(draft, 0)})",
        f"torch.div({a}, {n}, rounding_mode={draft.pick('floor', 'trunc')!r})",
        f"torch.fmod({a}, {n + 1})",
        f"torch.remainder({a}, {n + 1})",
        f"({a} ^ 1)",
        f"({a} & {draft.pick(1, 2)})",
        f"({a} | {draft.pick(1, 2)})",
        f"({a} >> 1)",
        f"torch.sign({a})",
    ]
    return str(draft.pick(*forms))


def compared(draft: Draft, depth: int = 1) -> str:
    """A comparison of two whole numbers."""
    relation = draft.pick(">=", ">", "<=", "<", "==", "!=")
    other = whole(draft, 0) if draft.maybe(3) else str(draft.number(-2, 4))
    return f"({whole(draft, depth)} {relation} {other})"


#: what models write, with a key for each query
USUAL = (
    "(i >= j)",
    "(j <= i)",
    "(i >= j)",
    "~(j > i)",
    "(j <= i + (m - n)).logical_or(j == 0)",
    "((i >= j) & (i - j < 3))",
    "((i >= j) | (j < 2))",
    "((j < 3) | (j <= i))",
    "((i >= j) & (j <= i + 1))",
    "((j < i + 1) & (j < i + 3))",
    "((j <= i) | (j < i - 1))",
    "((i >= j) ^ ((j == 1) & (i < 1)))",
    "torch.logical_xor(i >= j, (j == 1) & (i > 1))",
    "(torch.logical_xor(j <= 1, j == 1) | (i == j))",
    "(torch.full((), 0.5, device=q.device) <= i - j + 1)",
    "((i + 1) // 2 == (j + 1) // 2)",
    "(((i - 1) // 2 == (j - 1) // 2) & (i >= j))",
    "((i + 2) // 3 == (j + 2) // 3)",
    "(torch.full((), -0.5, device=q.device) < i - j)",
    "(torch.full((), 0.5, device=q.device) > j - i)",
)

KNOWN = (
    *USUAL,
    "(i >= j)",
    "(j <= i + (m - n))",
    "(j - i < 1)",
    "~(j > i)",
    "((i >= j) & (i - j < 3))",
    "((i - j).abs() <= 2)",
    "((i - j < 3) & (j - i < 2))",
    "((i >= j) | (j < 2))",
    "(i // 2 == j // 2)",
    "((i + 1) // 2 == (j + 1) // 2)",
    "((i // 3 == j // 3) & (i >= j))",
    "((i + 1) // 2 >= (j + 1) // 2)",
    "(j < 3)",
    "(j >= m - 3)",
    "((j % 2 == 0) | (i == j))",
    "(i + 1 > j)",
    "(2 * i - 2 * j + 1 >= 0)",
    "((i - j) % 3 == 0)",
    "((j - i) // 2 <= 0)",
    "(i >= j).logical_xor(j == 1)",
    "torch.where(i < 2, i >= j, j < 3)",
    "((i // 2 == j // 2) & (j <= i))",
    "((j < 3) & (j <= (i // 2) * 2 + 1))",
    "((j < 4) & (j <= i + 1))",
)


def known(draft: Draft) -> str:
    """A condition that has a kind of its own."""
    return band(draft) if draft.maybe(3) else str(draft.pick(*KNOWN))


def band(draft: Draft) -> str:
    """Keys from so many before a query up to so many after it, as many or others; one of the two ends may be open."""
    if draft.maybe(3):
        apart, width = draft.pick("(i - j)", "(j - i)"), draft.number(0, 3)
        return str(draft.pick(f"({apart}.abs() <= {width})", f"({apart}.abs() < {width + 1})"))
    left, right = draft.pick(0, 1, 2, 3, 4, -1), draft.pick(0, 1, 2, 3, 1, -1)
    lower = draft.pick(f"(i - j <= {left})", f"(j >= i - {left})", f"(i - j < {left + 1})")
    upper = draft.pick(f"(j - i <= {right})", f"(j <= i + {right})", f"(j < i + {right + 1})")
    both = f"({lower} & {upper})"
    return str(draft.pick(both, both, upper, upper, f"({upper} & (j >= {max(left, 0)}))"))


def condition(draft: Draft, depth: int = 2) -> str:
    """Truth values over (q, k), by positions."""
    if depth == 0 or draft.maybe(3):
        return str(draft.pick(*KNOWN, *USUAL)) if draft.maybe() else compared(draft)
    if draft.maybe(3):
        return str(draft.pick(draft.pick(*USUAL), bounds(draft), chunks(draft), band(draft)))
    a, b = condition(draft, depth - 1), condition(draft, depth - 1)
    forms = [f"({a} & {b})", f"({a} | {b})", f"(~{a})", f"({a} ^ {b})", f"torch.where({compared(draft)}, {a}, {b})"]
    return str(draft.pick(*forms))


def bounds(draft: Draft) -> str:
    """Two bounds of one thing, of which one says nothing."""
    of = draft.pick("(i - j)", "j", "(j - i)", "(i + j)", "(i - j)")
    a, b = draft.number(-1, 3), draft.number(0, 3)
    both = draft.pick("&", "&", "|")
    relation = draft.pick(">=", "<", "<=")
    return f"(({of} {relation} {a}) {both} ({of} {relation} {b}))"


def chunks(draft: Draft) -> str:
    """Queries and keys whose quotients are the same: chunks, which begin anywhere. Of numbers below zero each division is another one."""
    size, start = draft.number(2, 3), draft.number(-3, 3)
    divided = draft.pick(
        *["({0} + {1}) // {2}"] * 3,
        "torch.div({0} + {1}, {2}, rounding_mode='floor')",
        "torch.div({0} + {1}, {2}, rounding_mode='trunc')",
        "({0} + {1} - ({0} + {1}) % {2})",
        "({0} + {1}) / {2} // 1",
    )
    query, key = divided.format("i", start, size), divided.format("j", start, size)
    same = f"({query} == {key})"
    return str(draft.pick(same, same, f"({key} == {query})", f"({same} & (i >= j))", f"({same} | (j == 0))"))


def with_a_key(draft: Draft, mask: str) -> str:
    """The mask, mostly with a key for each row."""
    if mask in USUAL or draft.maybe(4):
        return mask
    return str(draft.pick(f"({mask} | (j == 0))", f"({mask} | (j <= 0))", f"({mask} | (i == j) | (j == 0))"))


# ---- integers that are less than numbers ------------------------------------------------------------------------------------


def wrapped(draft: Draft) -> str:
    """A condition of whole numbers that may wrap, or round another way than Python's."""
    dtype = draft.pick("torch.int32", "torch.int32", "torch.int64", "torch.int16", "torch.int8", "torch.uint8")
    large = {"torch.int64": 3037000500 * 2**20, "torch.int16": 9001, "torch.int8": 43, "torch.uint8": 100}
    factor = large.get(dtype, draft.pick(1103515245, 1500000000, 2**30))
    draft.add(f"a, c = i.to({dtype}), j.to({dtype})")
    top = f"torch.iinfo({dtype}).max"
    forms = [
        f"(((a * {factor} + 12345) % 3) == ((c * {factor} + 12345) % 3))",
        f"((a - c) * {factor} >= 0)",
        f"(torch.full_like(c, {top}) + c < 0)",
        f"(({top} - a) + c >= 0)",
        f"((a - {min(factor, 100)}) // 7 <= (c - {min(factor, 100)}) // 7)",
        f"((a * {factor}) * (c + 1) > 0)",
        f"(-(a - torch.iinfo({dtype}).min) <= c)",
        f"((a - c).abs() * {factor} < {min(factor, 2**31 - 1)})",
        "(a - c <= 200)",
        "(a - c >= 0)",
        f"((a - c).to(torch.{draft.pick('uint8', 'int8', 'int16')}) < 3)",
        "((c - a - 1).to(torch.uint8) > 250)",
        f"(torch.cumsum(torch.full_like(c, {min(factor, 2**31 - 1)}), -1, dtype={dtype}) > 0)",
        f"((a - c) % {draft.pick(3, -3)} == 0)",
        f"((a - c) // {draft.pick(2, -2)} <= 0)",
        f"(torch.fmod(a - c, 2) {draft.pick('==', '>=')} 0)",
        f"(torch.div(a - c, 2, rounding_mode={draft.pick('trunc', 'floor')!r}) == 0)",
        "((a.to(torch.float32) * 16777216 + c.to(torch.float32)) - a.to(torch.float32) * 16777216 >= 1)",
        f"torch.arange({draft.pick(250, 120)}, {draft.pick(250, 120)} + m, device=q.device).to({dtype}) > a",
    ]
    return f"({draft.pick(*forms)})"


def quotients(draft: Draft) -> str:
    """One op on whole numbers of both signs, compared with a small number."""
    a = draft.pick("(i - j)", "(j - i)", "(1 - j)", "(i - 2)", "(i + j)")
    n = draft.pick(2, 3)
    op = draft.pick(
        f"torch.div({a}, {n}, rounding_mode='trunc')",
        f"torch.div({a}, {n}, rounding_mode='floor')",
        f"torch.fmod({a}, {n})",
        f"({a} % {n})",
        f"({a} % -{n})",
        f"({a} // {n})",
        f"({a} // -{n})",
        f"({a} & {draft.pick(1, n)})",
        f"({a} | {draft.pick(1, n)})",
        f"({a} ^ 1)",
        f"({n} - {a})",
        f"({a} >> 1)",
        f"torch.sign({a})",
    )
    relation = draft.pick(">=", "<=", "==", "<", "!=")
    if draft.maybe(4):
        return f"({op} {relation} {op.replace(a, '(i + 1)' if draft.maybe() else 'j')})"
    return f"({op} {relation} {draft.number(-1, 2)})"


def rounded(draft: Draft) -> str:
    """A condition of floats, which are rounded."""
    dtype = draft.pick("torch.float32", "torch.float32", "torch.float16", "torch.bfloat16", "torch.float64")
    if draft.maybe():
        return _rounded_alone(draft)
    draft.add(f"a, c = i.to({dtype}), j.to({dtype})")
    forms = [
        f"(a / {draft.pick(3, 7, 10)} * {draft.pick(3, 7, 10)} >= c)",
        "(a * 0.1 >= c * 0.1)",
        "((a + 2048) - (c + 2048) >= 0)",
        "(a + 256 > c + 256)",
        "(a * 0.1 + 0.2 > c * 0.1 + 0.19999999)",
        "((a - c) / 3 >= 0)",
        "((c / 3).floor() <= (a / 3).floor())",
        "(a >= c)",
        "(a - c > -0.5)",
        "(a.sqrt() >= c.sqrt())",
        "((a / 2).long() == (c / 2).long())",
        "((a / -2).long() >= (c / -2).long())",
        "(c <= a + 1e-9)",
        "((a - 65504.0) <= (c - 65504.0))",
        "(a * 3 - c * 3 >= 0)",
        "((c + 1).log() <= (a + 1).log())",
        "(torch.pow(2.0, a) >= torch.pow(2.0, c))",
        "(a.exp2() >= c.exp2())",
        "((1.0 / (a + 1)) <= (1.0 / (c + 1)))",
    ]
    return f"({draft.pick(*forms)})"


#: the first whole number that the next one is rounded to
_FAR = {"torch.bfloat16": 256, "torch.float16": 2048, "torch.float32": 2**24, "torch.float64": 2**53}


def _rounded_alone(draft: Draft) -> str:
    """The same of keys alone, or of queries alone: what a kernel would work out for each of them by itself. All have the first key."""
    dtype = draft.pick("torch.bfloat16", "torch.float16", "torch.bfloat16", "torch.float16", *_FAR)
    draft.add(f"a, c = i.to({dtype}), j.to({dtype})")
    far, number = _FAR[dtype] + draft.pick(0, 0, 0, -1), draft.pick(0, 0, 3, 3, 1, 2)
    bound = draft.pick(f"(c + {far} <= {far + number})", f"(c + {far} < {far + number + 1})")
    forms = [
        *[bound] * 4,
        f"((c + {far}) - {far} <= {number})",
        f"((c + 1) / {draft.pick(3, 7, 10)} <= {number} / 3 + 0.34)",
        f"((c + {far}) % 2 == {far % 2})",
        f"((a + {far} > {far + number}) | (j == 0))",
    ]
    return f"({draft.pick(*forms)})"
