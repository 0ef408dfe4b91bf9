"""Tensors that masks are made with: by ops that move and choose, by what is written, by what a tensor holds for a key."""

from __future__ import annotations

from tests.fuzz.grammar.conditions import USUAL, condition
from tests.fuzz.grammar.draft import Draft


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
        f"{c} = {base}.reshape(-1).view(n, m)",
        f"{c} = {base}[torch.arange(n, device=q.device)]",
        f"{c} = {base}[:, torch.arange(m, device=q.device).flip(0)]",
        f"{c} = {base}.index_select(1, (torch.arange(m, device=q.device) + 1).clamp(max=m - 1))",
        f"{c} = {base}.gather(1, ((j + i) % m).expand(n, m))",
        f"{c} = torch.diff(torch.arange(m, device=q.device) * {a}, prepend=torch.ones(1, dtype=torch.int64, device=q.device))[None] < i",
        f"{c} = {base}.unsqueeze(0).transpose(1, 2).squeeze(0).t()",
        f"{c} = {base}.float().{draft.pick('bool()', 'gt(0.5)', 'ne(0)', 'long().bool()')}",
        f"{c} = (1 - {base}.float()) * 2 <= 1",
        f"{c} = torch.vmap(torch.vmap(lambda x, y: (x >= y) | (y < {b}), (None, 0)), (0, None))(i[:, 0], j[0])",
        f"{c} = torch.vmap(lambda x: (x - j[0]).abs() <= {b})(i[:, 0])",
        f"{c} = torch.vmap(lambda x: (x >= i[:, 0]) | (x == 0), out_dims=1)(j[0])",
    ]
    draft.add(draft.pick(*forms))
    return c


def _moved(draft: Draft) -> str:
    """A mask (n, m) by one op that picks, repeats or broadcasts."""
    if draft.maybe(4):
        return _from_the_end(draft)
    if draft.maybe(5):
        return _mapped(draft)
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
        "(torch.arange((n + 1) // 2, device=q.device)[:, None] + 1 > j).repeat_interleave(2, 0)[:n]",
        "(i >= torch.arange((m + 1) // 2, device=q.device)[None]).repeat_interleave(2, 1)[:, :m]",
        f"torch.ones((n, m), dtype=torch.int64, device=q.device).tril({a}) > 0",
        "(torch.arange(m - n, m, device=q.device)[:, None] >= j) | (j == 0)",
        f"(torch.arange({a}, n + {a}, device=q.device)[:, None] >= j)",
        f"(torch.arange({a}, m + {a}, device=q.device)[None] <= i + {a})",
    ]
    return str(draft.pick(*forms))


def _mapped(draft: Draft) -> str:
    """A mask (n, m) by vmap, over an axis that is not the first: of what goes in, of what comes out, or of both."""
    base, last = draft.pick(*USUAL), draft.pick("1", "-1")
    forms = [
        f"torch.vmap(lambda x: x, in_dims={last})({base}).t()",
        f"torch.vmap(lambda x: x, out_dims={last})({base}).t()",
        f"torch.vmap(lambda x: x & (i[:, 0] >= 0), in_dims={last}, out_dims={last})({base})",
        f"torch.vmap(lambda x: x & (i[:, 0] < 4), in_dims=1, out_dims={last})({base}) | (j == 0)",
        f"torch.vmap(lambda x, y: x & (y < 4), in_dims=({last}, 0), out_dims=1)({base}, j[0])",
        f"torch.vmap(lambda x, y: x & (y >= j[0]), in_dims=(0, 1))({base}, i.mT)",
        f"torch.vmap(lambda y: i[:, 0] >= y, in_dims={last}, out_dims={last})(j).squeeze(0)"
        if draft.maybe(4)
        else "torch.vmap(lambda y: (i >= y)[:, 0], in_dims=1, out_dims=1)(j)",
        f"torch.vmap(torch.vmap(lambda x: x, in_dims=0), in_dims={last}, out_dims={last})({base})",
    ]
    return str(draft.pick(*forms))


def intervals(draft: Draft) -> str:
    """Keys up to one bound and up to another one, of which neither is known to be the smaller: each is an interval of a query.

    All have the first key, or all have the key at the query's own place.
    """
    with_first = draft.maybe()
    found = []
    for _ in range(draft.pick(2, 2, 3)):
        if draft.maybe(3):
            given = draft.new("len", ("b",), "length") + ".view(-1, 1, 1, 1)"
            found.append(draft.pick(f"(j < {given})", f"(j <= {given} * 2)") if with_first else f"(j <= i + {given})")
            continue
        number = draft.number(0, 4)
        forms = (
            (f"(j <= {number})", f"(j <= {number})", "(j <= (i // 2) * 2)", f"(i // 3 >= j - {number})")
            if with_first
            else ("(i // 3 == j // 3)", f"(j >= i - {number})", f"(j >= (i // 2) * 2 - {number})")
        )
        both = (f"(j <= i + {number})", f"((i >= j) | (j < {number}))", f"(j <= (i // 2) * 2 + {1 + number % 2})")
        found.append(draft.pick(*forms, *both))
    return f"({' & '.join(found)})"


def _from_the_end(draft: Draft) -> str:
    """A mask (n, m) by indices of which some are negative: such an index counts from the end."""

    def index(position: str, size: str) -> str:
        return str(
            draft.pick(
                f"{position} - 1",
                f"{position} - 1",
                f"{position} - {size}",
                f"-{position} - 1",
                f"-{position}",
                f"({position} + 1) % {size} - 1",
                f"{position}.clamp(max=1) - 1",
            )
        )

    base, a = draft.pick(*USUAL), draft.number(0, 1)
    keys = f"torch.arange(m, device=q.device)[{index('j', 'm')}]"
    queries = f"torch.arange(n, device=q.device)[{index('i', 'n')}]"
    forms = [
        f"({keys} <= i + {a})",
        f"({queries} + {a} >= j)",
        f"({queries} >= {keys})",
        f"({base})[{index('i[:, 0]', 'n')}]",
        f"({base})[:, {index('j[0]', 'm')}]",
        f"({base})[{index('i', 'n')}, {index('j', 'm')}]",
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
        f"{c}[:1].add_(1)" if ".long()" in start else f"{c}[:, 0].logical_not_()",
        f"{c}[torch.where(i[:, 0] < 2)[0]] = True" if draft.maybe(6) else f"{c}.narrow(0, 0, 1).zero_()",
        f"{c}.select(1, 0).fill_(True)",
    ]
    for _ in range(draft.number(1, 2)):
        draft.add(draft.pick(*forms))
    if ".long()" in start:
        draft.add(f"{c} = {c}{draft.pick('.bool()', ' != 0', ' > 0')}")
    return c


def of_tensors(draft: Draft) -> str:
    """A condition that asks tensors: (b, 1, q, k), or what broadcasts to it; gives an expression."""
    kind = draft.pick("padding", "padding", "ids", "length", "kept", "table", "start", "chosen")
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
            return _of_two(draft)
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
    if kind == "chosen":
        return _chosen(draft)
    if kind == "table":
        t = draft.new("kept", (draft.pick(4, 7),), "kept")
        size = draft.inputs[-1].shape[0]
        index = draft.pick(
            f"(i - j).abs() % {size}", f"(i - j).clamp(0, {int(size) - 1})", "(j - i).clamp(-1, 1)", "(i * 0)"
        )
        return f"({t}[{index}] | (j == 0))"
    f = draft.new("first", ("b",), "length")
    return f"((j + 1 >= {f}.view(-1, 1, 1, 1)) | (i < j))"


def _of_two(draft: Draft) -> str:
    """Queries and keys whose numbers are the same, each by a tensor of its own: no documents. Mostly each query has a key."""
    queries = draft.new("ids", ("b", "q"), draft.pick("padding", "padding", "ids"))
    keys = draft.new("ids", ("b", "k"), draft.pick("split", "split", "padding")) + ".long()"
    query, key = f"{queries}[:, None, :, None]", f"{keys}[:, None, None, :]"
    return str(
        draft.pick(
            f"({query} == {key})",
            f"({key} == {query})",
            f"({query} == {key})",
            f"({key} == {query})",
            f"({query} == 1 - {key})",
            f"(({query} == {key}) & (j <= i + 1))",
            f"(({query} == {key}) | (i == j))",
        )
    )


def _chosen(draft: Draft) -> str:
    """A number for each key, which what a tensor holds for it chooses, compared with another one."""
    row = draft.new("ids", ("b", "k"), draft.pick("ids", "ids", "padding")) + "[:, None, None, :]"
    a, b = draft.number(0, 2), draft.number(-1, 2)
    number = draft.pick(
        f"torch.where({row} == {a}, {b}, {row})",
        f"torch.where({row} != {a}, {row}, {b})",
        f"{row}.masked_fill({row} == {a}, {b})",
        f"torch.where({row} == {a}, {row} + 1, {row} * 2)",
        f"torch.where({row} >= {a}, {b}, {row})",
        f"torch.where(torch.where({row} == {a}, {b}, {row}) == {b}, {row}, {a})",
    )
    return (
        f"(({number} {draft.pick('!=', '==', '>', '<=')} {draft.number(0, 2)}) | {draft.pick('(j == 0)', '(i == j)')})"
    )


def documents(draft: Draft) -> str:
    """Queries and keys of one document: by ids, or by how many documents have begun."""
    if draft.maybe():
        return _of_two(draft)
    length = "q" if draft.sizes["q"] > draft.sizes["k"] else "k"
    ids = draft.new("ids", ("b", length), "ids")
    if draft.maybe(4):
        draft.add(f"ids = {ids}.cumsum(-1)")
        ids = "ids"
    same = f"({ids}[:, None, :n, None] == {ids}[:, None, None, :m])"
    if length == "q":
        # The last queries have no key at their own place.
        return str(draft.pick(f"({same} | (j == 0))", f"({same} | (i >= j))", same))
    return str(draft.pick(same, same, f"({same} & (i >= j))", f"({same} & (j <= i + 1))", f"({same} | (i >= j))"))


def term(draft: Draft, kind: str, *, keep_rank: bool = False, least: int = 1, grad: bool | None = None) -> str:
    """An input that broadcasts to the scores. least: dimensions."""
    shape = [draft.product(dim) if draft.maybe() else 1 for dim in draft.dims]
    dropped = 0 if keep_rank else draft.number(0, len(shape) - least)
    return draft.new("m", shape[dropped:], kind, grad=grad)
