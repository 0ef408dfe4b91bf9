"""Masks: truth values over (query, key) by expressions, by tensors, by what is written, and how they are put on the scores."""

from __future__ import annotations

from tests.fuzz.grammar.draft import Draft

#: how what is shut out is filled
FILLS = ("-inf", "torch.finfo(s.dtype).min", "-1e9", "-65504.0", "-1e5", "-30000.0", "-1e4", "-inf")


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
        f"torch.div({plain} * 2 + 1, 2, rounding_mode='floor')",
        f"-torch.div(-{plain} * 2 - 1, 2, rounding_mode='trunc')",
        f"({size} - 1 - {plain}.flip(0).flip(0)).flip(0)",
        f"torch.full(({size},), 2, device=q.device).cumsum(0).sub(2) // 2",
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


def condition(draft: Draft, depth: int = 2) -> str:
    """Truth values over (q, k), by positions."""
    if depth == 0 or draft.maybe(3):
        return str(draft.pick(*KNOWN, *USUAL)) if draft.maybe() else compared(draft)
    if draft.maybe(3):
        return str(draft.pick(*USUAL)) if draft.maybe() else bounds(draft)
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
        f"({a} & {n})",
        f"({a} | {n})",
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


# ---- tensors that masks are made with ---------------------------------------------------------------------------------------


def made(draft: Draft) -> str:
    """A mask (q, k) by ops that move, scan, choose or fill; gives its name."""
    c = draft.name("c")
    base = condition(draft, 1) if draft.maybe() else str(draft.pick(*USUAL))
    a, b = draft.number(0, 2), draft.number(1, 3)
    dim = draft.pick(0, 1, -1)
    if draft.maybe(3):
        draft.add(f"{c} = {_moved(draft)}")
        return c
    forms = [
        f"{c} = torch.ones(n, m, dtype=torch.bool, device=q.device).tril({a})",
        f"{c} = torch.ones(n, m, dtype=torch.bool, device=q.device).tril({a}).triu(-{b})",
        f"{c} = torch.triu(torch.ones(n, m, device=q.device), {b}) == 0",
        f"{c} = ~torch.full((n, m), True, device=q.device).triu({b})",
        f"{c} = torch.cat([{base}[:, {a}:], {base}[:, :{a}]], 1)",
        f"{c} = torch.cat([{base}[:{a}], {base}[{a}:]], 0)",
        f"{c} = torch.cat([torch.ones(n, {b}, dtype=torch.bool, device=q.device), {base}], 1)[:, :m]",
        f"{c} = {base}.roll({b}, {dim})",
        f"{c} = {base}.flip({dim})",
        f"{c} = torch.ones(n, m, dtype=torch.{draft.pick('int64', 'int32', 'uint8')}, device=q.device).cumsum({dim}) <= i + {b}",
        f"{c} = (torch.ones(m, device=q.device).cumsum(0) - 1)[None, :] <= i",
        f"{c} = torch.zeros(n, m, dtype=torch.bool, device=q.device).masked_fill({base}, True)",
        f"{c} = torch.where({base}, torch.ones((), dtype=torch.bool, device=q.device), j < {b})",
        f"{c} = {base}.repeat_interleave(2, {dim}).narrow({dim}, 1, {base}.shape[{dim}])",
        f"{c} = {base}.repeat(2, 1)[:n]",
        f"{c} = {base}.repeat(1, 2)[:, {a}:m + {a}]",
        f"{c} = {base}.expand(2, n, m)[1]",
        f"{c} = {base}.reshape(-1).view(n, m)",
        f"{c} = {base}[torch.arange(n, device=q.device)]",
        f"{c} = {base}[:, torch.arange(m, device=q.device).flip(0)]",
        f"{c} = {base}.index_select(1, (torch.arange(m, device=q.device) + 1).clamp(max=m - 1))",
        f"{c} = {base}.gather(1, ((j + i) % m).expand(n, m))",
        f"{c} = torch.diff(torch.arange(m, device=q.device) * {a}, prepend=torch.ones(1, dtype=torch.int64, device=q.device))[None] < i",
        f"{c} = torch.stack([{base}, {base}], {dim % 2}).select({dim % 2}, 1)",
        f"{c} = {base}.unsqueeze(0).transpose(1, 2).squeeze(0).t()",
        f"{c} = {base}.float().{draft.pick('bool()', 'gt(0.5)', 'ne(0)', 'long().bool()')}",
        f"{c} = (1 - {base}.float()) == 0",
        f"{c} = (1 - {base}.float()) * 2 <= 1",
        f"{c} = {base} ^ torch.{draft.pick('ones', 'zeros')}(n, m, dtype=torch.bool, device=q.device)",
        f"{c} = torch.vmap(torch.vmap(lambda x, y: (x >= y) | (y < {b}), (None, 0)), (0, None))(i[:, 0], j[0])",
        f"{c} = torch.vmap(lambda x: (x - j[0]).abs() <= {b})(i[:, 0])",
        f"{c} = torch.vmap(lambda x: (x >= i[:, 0]) | (x == 0), out_dims=1)(j[0])",
    ]
    draft.add(draft.pick(*forms))
    return c


def _moved(draft: Draft) -> str:
    """A mask (n, m) by one op that picks, repeats or broadcasts."""
    base, a = draft.pick(*USUAL), draft.number(0, 2)
    forms = [
        f"({base})[:1].expand(n, m)",
        f"({base})[-1:].expand(n, -1)",
        f"({base})[:, :1].expand(n, m) | (i >= j)",
        f"({base})[:, -1:].expand(-1, m) | (i >= j)",
        "(j[:, :1] + i >= j).expand(n, m)",
        "(i[-1:].expand(n, 1) >= j)",
        "(j[:, -1:].expand(1, m) - j <= i)",
        f"torch.stack([{base}, j <= i + 1, i >= j]).select(0, {a})",
        f"(torch.arange(3, device=q.device)[:, None, None] + i >= j)[{a}]",
        "(torch.arange(2 * m, device=q.device).view(m, 2)[:, 1] <= 2 * i + 1)",
        "(torch.arange(2 * m, device=q.device)[::2] <= 2 * i)",
        f"(torch.arange(3 * m, device=q.device)[1::3][None] <= 3 * i + {a})",
        "((torch.arange(2 * n, device=q.device)[:, None] >= torch.arange(2 * m, device=q.device)[None])[::2, ::2])",
        "(torch.arange((m + 1) // 2, device=q.device).repeat_interleave(2, dim=0)[:m] <= i // 2)",
        "(torch.arange(m, device=q.device).repeat_interleave(2, dim=0)[:m] == (i // 2)) | (i >= j)",
        "(torch.arange(m, device=q.device)[j - 1] <= i) | (j == 0)",
        f"({base})[i[:, 0] - 1] | (j == 0)",
        f"({base})[i[:, 0] - n]",
        f"({base})[:, j[0] - m]",
        "(torch.arange((n + 1) // 2, device=q.device)[:, None] + 1 > j).repeat_interleave(2, 0)[:n]",
        "(i >= torch.arange((m + 1) // 2, device=q.device)[None]).repeat_interleave(2, 1)[:, :m]",
        "torch.ones(n, m, dtype=torch.bool, device=q.device)",
        "(torch.ones(n, m, device=q.device).tril() == 1)",
        f"torch.ones((n, m), dtype=torch.int64, device=q.device).tril({a}) > 0",
        "(torch.arange(m - n, m, device=q.device)[:, None] >= j) | (j == 0)",
        f"(torch.arange({a}, n + {a}, device=q.device)[:, None] >= j)",
        f"(torch.arange({a}, m + {a}, device=q.device)[None] <= i + {a})",
    ]
    return str(draft.pick(*forms))


def written(draft: Draft) -> str:
    """A mask that is written to after it was made; gives its name."""
    c = draft.name("c")
    start = draft.pick(
        condition(draft, 1) + ".clone()",
        "torch.zeros(n, m, dtype=torch.bool, device=q.device)",
        "torch.ones(n, m, dtype=torch.bool, device=q.device)",
        condition(draft, 1) + ".long()",
    )
    draft.add(f"{c} = {start}")
    if draft.maybe(3):
        draft.add(f"{c} = {draft.pick('torch.zeros', 'torch.ones')}(n, m, dtype=torch.bool, device=q.device)")
        first, step = draft.number(0, 1), draft.number(2, 3)
        draft.add(
            draft.pick(
                f"{c}[:, {first}::{step}] = {draft.pick('True', 'False')}",
                f"{c}[{first}::{step}] = {draft.pick('True', 'False')}",
                f"{c}[::{step}] = {draft.pick(*USUAL)}[::{step}]",
                f"{c}.copy_({draft.pick(*USUAL)})",
                f"{c}[:] = {draft.pick(*USUAL)}",
                f"{c}[:, :] = i >= j",
                f"{c}[:, :2].copy_((i >= j)[:, :2])",
            )
        )
        return c
    value = draft.pick("True", "False", condition(draft, 0))
    row = draft.pick("True", "False", "(j[0] < 2)")
    a, b = draft.number(0, 2), draft.number(1, 3)
    forms = [
        f"{c}[{a}:{a + b}] = {row}",
        f"{c}[:, {a}:{a + b}] = {draft.pick('True', 'False')}",
        f"{c}[:, {a}::2] = {draft.pick('True', 'False')}",
        f"{c}[-1] = {row}",
        f"{c}[:, -1] = {draft.pick('True', 'False')}",
        f"{c}[:, -{b}:] = {draft.pick('True', 'False')}",
        f"{c}.fill_({draft.pick('True', 'False')})" if draft.maybe(4) else f"{c}[0].fill_(True)",
        f"{c}.copy_({condition(draft, 1)})",
        f"{c}.masked_fill_({condition(draft, 0)}, {draft.pick('True', 'False')})",
        f"{c} &= {condition(draft, 0)}" if ".long()" not in start else f"{c} *= {condition(draft, 0)}.long()",
        f"{c}.logical_or_({condition(draft, 0)})",
        f"{c}.mT[0] = True",
        f"{c}.view(-1)[{a}:{a + b}] = True",
        f"{c}.t()[{a}].logical_xor_(torch.ones((), dtype=torch.bool, device=q.device))",
        f"{c}.unsqueeze(0)[:, :, :1].fill_(True)",
        f"{c}.tril_({a})",
        f"{c}[{condition(draft, 0)}] = True",
        f"for x in range({c}.shape[0]): {c}[x, : x + {b}] = {draft.pick('True', 'False')}",
        f"for x in range({c}.shape[0]): {c}[x, max(0, x - {b}) : x + 1] = True",
        f"{c}.diagonal().fill_(True)",
        f"{c}[:1].add_(1)" if ".long()" in start else f"{c}[:, 0].logical_not_()",
        f"{c}[torch.where(i[:, 0] < 2)[0]] = True" if draft.maybe(6) else f"{c}.narrow(0, 0, 1).zero_()",
        f"{c}.select(1, 0).fill_(True)",
        f"{c}[...] = {value}",
    ]
    for _ in range(draft.number(1, 2)):
        draft.add(draft.pick(*forms))
    if ".long()" in start:
        draft.add(f"{c} = {c}{draft.pick('.bool()', ' != 0', ' > 0')}")
    return c


def of_tensors(draft: Draft) -> str:
    """A condition that asks tensors: (b, 1, q, k), or what broadcasts to it; gives an expression."""
    kind = draft.pick("padding", "padding", "ids", "length", "kept", "table", "start")
    if kind == "padding":
        p = draft.new("pad", ("b", "k"), "padding")
        base = draft.pick(
            f"{p}[:, None, None, :].bool()",
            f"({p}[:, None, None, :] != 0)",
            f"({p} == 1)[:, None, None]",
            f"{p}.view({p}.shape[0], 1, 1, -1).to(torch.bool)",
            f"({p}.float()[:, None, None] > 0.5)",
            f"((1 - {p}[:, None, None].float()) * -1.0 > -0.5)",
            f"({p}.cumsum(-1) > 0)[:, None, None]",
            f"{p}.bool()[:, None, None, :].expand(-1, 1, n, -1)",
        )
        if draft.writes and draft.maybe(3):
            draft.add(f"kept_pad = {base}.clone()", f"{p}.{draft.pick('zero_()', 'fill_(1)', 'add_(1)', 'mul_(0)')}")
            base = "kept_pad"
        return (
            f"({base} & {draft.pick('(i >= j)', '(j >= 0)', condition(draft, 0))} | (j == 0))"
            if draft.maybe()
            else base
        )
    if kind == "ids":
        s = draft.new("ids", ("b", "k"), "ids")
        same = f"({s}[:, None, :n, None] == {s}[:, None, None, :])"
        if draft.maybe(4):
            # One id for each query, and another tensor's for the keys: no documents.
            other, own = draft.new("ids", ("b", "q"), "padding"), draft.new("ids", ("b", "k"), "padding")
            return str(
                draft.pick(
                    f"({other}[:, None, :, None] == {own}[:, None, None, :])",
                    f"({own}[:, None, None, :] == {other}[:, None, :, None])",
                    f"(({other}[:, None, :, None] == {own}[:, None, None, :]) & (i >= j))",
                )
            )
        if draft.maybe(4):
            other = draft.new("ids", ("b", "q"), "ids")
            return f"(({other}[:, None, :, None] == {s}[:, None, None, :]) | (j == 0))"
        if draft.sizes["q"] > draft.sizes["k"]:
            return f"({s}[:, None, None, :] != 1) | (j == 0)"
        return str(
            draft.pick(f"({same} & (i >= j))", same, f"({same} | (i >= j))", f"({same} & (j <= i + 1) | (j == 0))")
        )
    if kind == "length":
        given = draft.new("len", draft.pick(("b",), ()), "length")
        at = f"{given}.view(-1, 1, 1, 1)"
        extra = ""
        if draft.writes and draft.maybe():
            draft.add(draft.pick(f"{given}.add_(1)", f"before = {given}.clone(); {given}.fill_(1)"))
            extra = "before" if "before" in draft.lines[-1] and draft.maybe() else ""
        at = at if not extra else "before.view(-1, 1, 1, 1)"
        return str(
            draft.pick(
                f"(j < {at})", f"(j <= {at} - 1) & (i >= j)", f"(j <= i + {at})", f"((j >= {at} - 1) | (i >= j))"
            )
        )
    if kind == "kept":
        return term(draft, "kept")
    if kind == "table":
        t = draft.new("kept", (draft.pick(4, 7),), "kept")
        size = draft.inputs[-1].shape[0]
        index = draft.pick(
            f"(i - j).abs() % {size}", f"(i - j).clamp(0, {int(size) - 1})", "(j - i).clamp(-1, 1)", "(i * 0)"
        )
        return f"({t}[{index}] | (j == 0))"
    f = draft.new("first", ("b",), "length")
    return f"((j + 1 >= {f}.view(-1, 1, 1, 1)) | (i < j))"


def documents(draft: Draft) -> str:
    """Queries and keys of one document: by ids, or by how many documents have begun."""
    length = "q" if draft.sizes["q"] > draft.sizes["k"] else "k"
    ids = draft.new("ids", ("b", length), "ids")
    if draft.maybe(4):
        draft.add(f"ids = {ids}.cumsum(-1)")
        ids = "ids"
    if draft.maybe(3):
        # The queries have ids of their own: no documents.
        other = draft.new("ids", ("b", "q"), "padding")
        return f"({other}[:, None, :, None] == {ids}[:, None, None, :m])"
    same = f"({ids}[:, None, :n, None] == {ids}[:, None, None, :m])"
    return str(draft.pick(same, same, f"({same} | (j == 0))", f"({same} | (i >= j))"))


def term(draft: Draft, kind: str, *, keep_rank: bool = False, grad: bool | None = None) -> str:
    """An input that broadcasts to the scores."""
    shape = [draft.product(dim) if draft.maybe() else 1 for dim in draft.dims]
    dropped = 0 if keep_rank else draft.number(0, len(shape) - 1)
    return draft.new("m", shape[dropped:], kind, grad=grad)


# ---- into the dimensions of the scores ---------------------------------------------------------------------------------------


def placed(draft: Draft, text: str) -> str:
    """What broadcasts to (b, h, q, k), of any rank of two or more, in the dimensions of `s`."""
    if draft.dims == ("b", "h", "q", "k"):
        return text
    c = draft.name("c")
    draft.add(f"{c} = {text}")
    draft.add(f"{c} = {c}.expand(q.shape[0], {draft.sizes['h']}, n, m)")
    if "bh" in draft.dims:
        order = ["b", "h", *(d for d in draft.dims if d in ("q", "k"))]
        at = draft.dims.index("bh")
        inner = [*(d for d in draft.dims[:at]), "b", "h", *draft.dims[at + 1 :]]
        order = inner
        moved = f"{c}.permute({', '.join(str('bhqk'.index(d)) for d in order)}).flatten({at}, {at + 1})"
        return moved
    return f"{c}.permute({', '.join(str('bhqk'.index(d)) for d in draft.dims)})"


def any_condition(draft: Draft) -> str:
    """Truth values over the scores' pairs by any of the ways above."""
    positions(draft)
    forms = [condition, condition, made, made, of_tensors, of_tensors]
    if draft.writes:
        forms += [written, written]
    if draft.maybe(6):
        forms = [wrapped, rounded]
    form = draft.pick(*forms)
    found = str(form(draft))
    if form is of_tensors and found.startswith("m"):
        return found
    return placed(draft, with_a_key(draft, found) if form is not of_tensors else found)


def apply(draft: Draft, allowed: str, fill: str | None = None) -> None:
    """Lines that put a mask on `s`."""
    fill = fill or draft.pick(*FILLS)
    c = draft.name("c")
    draft.add(f"{c} = {allowed}")
    forms = [
        f"s = s.masked_fill(~{c}, {fill})",
        f"s = torch.where({c}, s, {fill})",
        f"s = torch.where(~{c}, {fill}, s)",
        f"s = s + torch.zeros_like({c}, dtype=s.dtype).masked_fill(~{c}, {fill})",
        f"t = torch.where({c}, 0.0, {fill}).to(s.dtype); s = s + t",
        f"t = torch.where(~{c}, {fill}, 0.0).to(s.dtype); s = s + t",
        f"t = torch.full({c}.shape, {fill}, dtype=s.dtype, device=s.device).masked_fill({c}, 0.0); s = s + t",
        f"s = s.masked_fill({c}.logical_not(), {fill})",
    ]
    if fill not in ("-inf", "inf"):
        forms += [
            f"s = s + (1.0 - {c}.to(s.dtype)) * {fill}",
            f"s = s + (~{c}) * {fill}"
            if fill.startswith("-") and "finfo" not in fill
            else f"s = s + (~{c}).to(s.dtype) * {fill}",
            f"s = s - torch.where({c}, 0.0, {fill}) * -1"
            if "finfo" not in fill
            else f"s = torch.where({c}, s, {fill})",
        ]
    if draft.writes:
        forms += [
            f"t = torch.where({c}, 0.0, {fill}).to(s.dtype).clone(); t[..., :1] = 0.5; s = s + t",
            f"t = torch.where({c}, 0.0, {fill}).to(s.dtype).contiguous(); s = s + t; t.data.zero_()",
            f"s = s.masked_fill_(~{c}, {fill})",
            f"x = {c}.clone(); s = s.masked_fill(~x, {fill}); x.logical_not_()",
        ]
    draft.add(draft.pick(*forms))
