"""Masks as algebra: by ops that join, move, pad and write elements, by diagonals, and by products and sums of zeros and ones."""

from __future__ import annotations

from tests.fuzz.grammar.conditions import USUAL, condition
from tests.fuzz.grammar.draft import Draft

# In the forms: a and b are conditions (n, m); x is 0 to 2, y 1 to 3; truth is True or False, number 0 or 1; $ is the device.
JOINED = (
    "torch.stack([{a}, {b}]).{both}(0)",
    "torch.stack([{a}, {b}], 2)[..., {number}]",
    "torch.hstack([{a}[:, {x}:], {b}[:, :{x}]])",
    "torch.vstack([{a}[:{x}], {b}[{x}:]])",
    "torch.column_stack([{a}[:, :{y}], {b}[:, {y}:]])",
    "torch.hstack([j[0, :{y}] + {x}, j[0, {y}:]])[None] <= i + {x}",
    "torch.vstack([i[:, 0], i[:, 0] + {y}])[{number}][:, None] >= j",
    "(p := torch.stack([i.expand(n, m), j.expand(n, m) - {x}], -1))[..., 0] >= p[..., 1]",
    "torch.cat([{a}[:1], {b}[1:-1], {a}[-1:]])[:n]",
)
MOVED = (
    "F.pad({a}[:, : m - {number}], (0, {number}), value={truth})",
    "F.pad({a}[:, {number}:], ({number}, 0), value={truth})",
    "F.pad({a}, ({x}, {y}), value={truth})[:, {number} : m + {number}]",
    "F.pad({a}[: n - 1], (0, 0, 1, 0), value={truth})",
    "F.pad({a}, (-1, 1, 1, -1), value={truth})",
    "F.pad({a}.float(), ({y}, 0), value={number}.0)[:, :m] > 0.5",
    "F.pad(j[:, 1:] - {x}, (0, 1), value={x}) <= i",
    "F.pad(j[:, 1:], (1, 0), value={y}) <= i + {x}",
    "{a}.flip(0, 1)",
    "torch.flip({a}, (-1,)) | (i >= j)",
    "{a}.flipud()",
    "{a}.fliplr() | (j == 0)",
    "torch.rot90({a}, 2)",
    "(m - 1 - j).flip(1) <= i + {x}",
    "{a}.roll(({x}, -{y}), (0, 1))",
    "{a}.roll(-{y}, 1)",
    "{a}.roll({y})",
    "j.roll({y}, -1) <= i",
    "i.roll(-{x}, 0) >= j",
)
DIAGONALS = (
    "torch.eye(n, m, dtype=torch.bool, $) | {a}",
    "torch.eye(n, m, $).cumsum(1) <= 0.5",
    "torch.eye(max({y}, 4), $)[i % 4, j % 4] > 0",
    "~torch.eye(n, m, dtype=torch.bool, $) & {a} | (j == 0)",
    "torch.eye(n, m, dtype=torch.int64, $) + {a} > {number}",
    "torch.diag(torch.ones(n + m, $))[:n, :m] == 1",
    "torch.diag(torch.arange(n + m, $) % 2, {x})[:n, :m] > 0",
    "torch.diag(torch.ones(n + m, dtype=torch.bool, $), -{x})[:n, :m]",
    "torch.diag_embed(torch.arange(n + m, $) % 3, offset={x} - 1)[:n, :m] > 0",
    "torch.diag_embed(torch.ones(n + m, $), offset=-{x})[:n, :m].bool() ^ {a}",
    "torch.diagonal_scatter(torch.ones(n + m, n + m, $), torch.zeros(n + m - {x}, $), {x})[:n, :m] > 0",
    "(j > i + {x}).fill_diagonal_({truth}) | (j == 0)",
    "{a}.long().fill_diagonal_({number}) == 1",
    "torch.ones(n, m, dtype=torch.bool, $).tril(m - n)",
    "torch.ones(n, m, $).tril(n // 2) > 0",
    "torch.ones(n, m, dtype=torch.bool, $).triu(-(m // 2)) & {a}",
    "torch.ones(n, m, dtype=torch.bool, $).tril((m - n) // {y})",
    "torch.triu({a}, n - m + {x})",
    "torch.tril({a}.long(), diagonal={x} - 1) == 1",
)
PRODUCTS = (
    "torch.kron(torch.eye((n + 1) // 2, (m + 1) // 2, $), torch.ones(2, 2, $))[:n, :m] > 0",
    "torch.kron({a}.long(), torch.ones(1, 2, dtype=torch.int64, $))[:, {number} : m + {number}] > 0",
    "torch.kron({a}[: (n + 1) // 2].float(), torch.ones(2, 1, $))[:n] > 0.5",
    "torch.outer((i[:, 0] > {x}).float(), (j[0] > {y}).float()) < 0.5",
    "torch.outer((i[:, 0] < {y}).long(), (j[0] < {x} + 1).long()).bool() | {a}",
    "torch.outer(i[:, 0] * 0 + 1, j[0]) <= i + {x}",
    "torch.einsum('ic,jc->ij', (i // 2 == torch.arange(4, $)).float(), (j.mT // 2 == torch.arange(4, $)).float()) > 0",
    "torch.einsum('ij,ij->ij', {a}.float(), {b}.float()) > 0",
    "torch.einsum('i,j->ij', (i[:, 0] >= {x}).to(torch.bfloat16), (j[0] >= {y}).to(torch.bfloat16)) == 0",
    "torch.einsum('ic,cj->ij', (i >= torch.arange(3, $)).float(), (torch.arange(3, $)[:, None] >= j).float()) > {number}",
    "torch.einsum('ij,ij,j->ij', {a}.float(), {b}.float(), (j[0] != {y}).float()) == 1",
    "(i == torch.arange({y}, $)).float() @ (torch.arange({y}, $)[:, None] == j).float() > 0",
    "(i % 3 == torch.arange(3, $)).float() @ (torch.arange(3, $)[:, None] == j % 3).float() > 0",
    "(i >= torch.arange({y}, $) * 2).float() @ (j >= torch.arange({y}, $)[:, None] * 2).float() > {number}",
    "F.one_hot(i[:, 0] // 2, n + m).float() @ F.one_hot(j[0] // 2, n + m).float().mT > 0",
    "F.one_hot(i[:, 0], n + m)[:, :m] + F.one_hot(i[:, 0] // 2, n + m)[:, :m] > {number}",
    "{a} ^ {b}",
    "{a} ^ ({b} & (j != {x}))",
    "{a} != {b}",
    "({a} == {b}) ^ (j > {y})",
    "{a}.float() * {b}.float() > 0",
    "({a}.to({dtype}) * {b}.to({dtype})).bool()",
    "1 - (1 - {a}.to({dtype})) * (1 - {b}.to({dtype})) == 1",
    "{a}.to({dtype}) + {b}.to({dtype}) > {number}",
    "{a}.float() - {b}.float() >= 0",
    "(1.0 - {a}.float()) * {b}.float() != 1",
    "torch.minimum({a}.long(), {b}.long()) > 0",
    "torch.maximum({a}.float(), {b}.float()).bool()",
    "{a} * {b}",
    "{a} + {b}",
    "{a}.float().pow(2) * {b} > 0.5",
)
PUT = (
    "torch.zeros(n, m, dtype=torch.bool, $).scatter(1, (i // 2).clamp(max=m - 1), True)",
    "{a}.scatter(1, (i + torch.arange({y}, $)) % m, {truth})",
    "{a}.scatter(0, ((j + {x}) // 2).clamp(max=n - 1), {truth})",
    "torch.zeros(n, m, $).scatter(1, (i * {y} + torch.arange(2, $)) % m, 1.0) > 0",
    "{a}.long().scatter_add(1, (i + torch.arange(2, $) * {x}) % m, (i + 1).expand(n, 2)) > {number}",
    "{a}.index_put((i[:, 0], (i[:, 0] + {x}) % m), torch.full((), {truth}, $))",
    "{a}.index_put((i[:, 0] // 2, (i[:, 0] * 2 + {x}) % m), torch.full((), {truth}, $))",
    "{a}.index_put((i, (i + torch.arange(2, $)) % m), torch.full((), {truth}, $))",
    "{a}.index_put(((j[0] * {y}) % n,), (j[0] <= {x}).expand(m, m))",
    "{a}.long().index_put((i[:, 0], (i[:, 0] + {x}) % m), torch.ones((), dtype=torch.int64, $), accumulate=True) > {number}",
    "{a}.index_fill(1, torch.arange(min({y}, m), $), {truth})",
    "{a}.index_fill(0, (torch.arange(2, $) * {x}) % n, {truth})",
    "torch.index_copy({a}, 1, torch.arange({y}, $) % m, {b}[:, :1].expand(n, {y}))",
    "{a}.slice_scatter({b}[:, {x}:], 1, {x})",
    "{a}.select_scatter({b}[0], 0, -1)",
    "{a}.masked_scatter(i == {x}, {b})",
)
#: statements on `c`, a mask of its own memory
WRITTEN = (
    "c[torch.arange(n, $), torch.arange(n, $) % m] = {truth}",
    "c[i[:, 0], (i[:, 0] // 2 + {x}) % m] = {truth}",
    "c[i, (i + torch.arange({y}, $)) % m] = {truth}",
    "c.scatter_(1, (i // 2 * 2).clamp(max=m - 1), {truth})",
    "c.index_fill_(1, torch.arange(min({y}, m), $), {truth})",
    "c.fill_diagonal_({truth})",
    "c.diagonal({x} - 1).fill_({truth})",
    "c ^= {b}",
    "for r in range(n): c[r] = j[0] <= r + {x}",
    "for r in range(n): c[r, max(0, r - {x}) : r + {y}] = {truth}",
    "for r in range(0, n, 2): c[r : r + 2, r : r + {y}] = {truth}",
    "for r in range(n): c[r, r // 2 * 2 : r // 2 * 2 + {y}] = True",
    "for r in range({y}): c[r % n, r:] = {truth}",
    "for r in range(0, n, {y}): c[r] = {b}[r]",
)


def masks(draft: Draft) -> str:
    """A mask (q, k) by one or two of these; gives its name."""
    name = draft.name("c")
    draft.add(f"{name} = {_form(draft, draft.pick(JOINED, MOVED, DIAGONALS, PRODUCTS, PUT))}")
    if draft.writes and draft.maybe():
        draft.add(f"c = {draft.pick(name + '.clone()', 'torch.zeros(n, m, dtype=torch.bool, device=q.device)')}")
        draft.add(_form(draft, WRITTEN))
        return "c"
    if draft.maybe(3):
        other = _form(draft, draft.pick(JOINED, MOVED, DIAGONALS, PRODUCTS, PUT), name)
        draft.add(f"{name} = {other}")
    return name


def _form(draft: Draft, forms: tuple[str, ...], *more: str) -> str:
    def base() -> str:
        found = draft.pick(*USUAL, *more * 20)
        return (
            str(found) if found in (*USUAL, *more) and not draft.maybe(4) else f"({condition(draft, 1)}).expand(n, m)"
        )

    text: str = draft.pick(*forms)
    return text.replace("$", "device=q.device").format(
        a=base(),
        b=base() if "{b}" in text else "",
        x=draft.number(0, 2),
        y=draft.number(1, 3),
        number=draft.number(0, 1),
        truth=draft.maybe(),
        both=draft.pick("any", "all"),
        dtype=draft.pick("torch.float32", "torch.bfloat16", "torch.float16"),
    )
