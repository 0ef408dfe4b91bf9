"""Rules about operands and results: views, orders of axes, products, strides, sizes, dtypes."""

from __future__ import annotations

import torch

from tests.fuzz.grammar import calls, conditions, masks, operands, scores, weights
from tests.fuzz.grammar.draft import Draft
from tests.fuzz.grammar.site import simple_site, site

#: dtypes of 16 bits
HALF = (torch.bfloat16, torch.float16)


def anything(draft: Draft) -> None:
    operands.operands(draft)
    draft.causal_allowed = not draft.maybe(8)
    draft.pick(site, site, calls.called)(draft)
    weights.after(draft)


def views(draft: Draft) -> None:
    """Operands through chains of views, and K/V of fewer heads in every spelling."""
    operands.operands(draft, most=4)
    draft.pick(lambda d: simple_site(d), lambda d: simple_site(d, scores.turn, scores.turn), calls.called)(draft)
    weights.after(draft, most=1)


def arrange(draft: Draft) -> None:
    """Axes of the scores in other orders and numbers: 3-D, windows of 5-D, folded batches, broadcast operands."""
    form = draft.pick("windows", "shared", "orders", "orders", "mqa", "groups")
    if form == "orders":
        operands.operands(draft, most=1)
        simple_site(draft, scores.turn, scores.mask, scores.turn, scores.bias, product="einsum")
    elif form == "windows":
        x = [
            draft.new(n, ("b", 2, length, "h*d"), grad=draft.grads)
            for n, length in (("q", "q"), ("k", "k"), ("v", "k"))
        ]
        h, d = draft.sizes["h"], draft.sizes["d"]
        for name, given in zip("qkv", x, strict=True):
            draft.add(f"{name} = {given}.unflatten(-1, ({h}, {d})).transpose(2, 3)")
        draft.add(draft.pick("s = q @ k.mT", "s = torch.einsum('bwhqd,bwhkd->bwhqk', q, k)"))
        draft.dims = ("b", "w", "h", "q", "k")
        draft.sizes["w"] = 2
        for _ in range(draft.number(0, 2)):
            scores.bias(draft)
        draft.add("w = s.softmax(-1)")
        draft.add(draft.pick("o = w @ v", "o = torch.einsum('bwhqk,bwhkd->bwhqd', w, v)"))
        draft.add(draft.pick("o = o.transpose(2, 3).flatten(3)", "o = o.permute(0, 2, 1, 3, 4)", "o = o * 1"))
        draft.outputs.append("o")
        return
    elif form == "shared":
        # K and V without a batch, or without heads.
        draft.add(f"q = {draft.new('q', ('b', 'h', 'q', 'd'), grad=draft.grads)}")
        for name, width in (("k", "d"), ("v", "e")):
            shape = draft.pick(
                ("h", "k", width), (1, "h", "k", width), ("b", 1, "k", width), ("k", width), (1, 1, "k", width)
            )
            draft.add(f"{name} = {draft.new(name, shape, grad=draft.grads)}")
            draft.add(
                draft.pick(
                    f"{name} = {name}",
                    f"{name} = {name} * 1",
                    f"{name} = {name}.expand(*q.shape[:2], *{name}.shape[-2:])",
                    f"{name} = {name}.expand(*q.shape[:2], *{name}.shape[-2:])",
                )
            )
        draft.dims = ("b", "h", "q", "k")
        draft.add(draft.pick("s = q @ k.mT", "s = torch.matmul(q, k.transpose(-2, -1)) * 0.3"))
        draft.add(
            "n, m = q.shape[2], k.shape[-2]",
            "i, j = torch.arange(n, device=q.device)[:, None], torch.arange(m, device=q.device)[None, :]",
        )
        if draft.maybe():
            masks.apply(draft, masks.placed(draft, f"({conditions.known(draft)} | (j == 0))"))
        draft.add("w = s.softmax(-1)", "o = w @ v")
    elif form == "mqa":
        h, d = draft.sizes["h"], draft.sizes["d"]
        x = draft.new("x", ("q", "b", f"{h + 2}", "d") if h else ("q", "b", "h", "d"), grad=draft.grads)
        draft.add(f"q, k, v = {x}.split(({h}, 1, 1), 2)")
        draft.add(*(f"{name} = {name}.permute(1, 2, 0, 3)" for name in "qkv"))
        draft.add(*draft.pick((f"k = k.expand(-1, {h}, -1, -1)", f"v = v.expand(-1, {h}, -1, -1)"), ()))
        draft.dims = ("b", "h", "q", "k")
        draft.sizes["k"], draft.sizes["e"] = draft.sizes["q"], d
        draft.add("s = q @ k.mT * 0.4")
        scores.mask(draft)
        draft.add("w = s.softmax(-1)", "o = w @ v")
    else:
        kv, group, d = draft.sizes["kv"], draft.sizes["h"] // draft.sizes["kv"], draft.sizes["d"]
        x = [
            draft.new("q", ("b", "q", "h", "d"), grad=draft.grads),
            draft.new("k", ("b", "k", "kv", "d"), grad=draft.grads),
        ]
        y = draft.new("v", ("b", "k", "kv", "e"), grad=draft.grads)
        order = draft.pick("x", "y")
        draft.add(f"q = {x[0]}.unflatten(2, {(kv, group) if order == 'x' else (group, kv)})", f"k, v = {x[1]}, {y}")
        inner = "hg" if order == "x" else "gh"
        draft.add(f"s = torch.einsum('bq{inner}d,bkhd->bhgqk', q, k) * 0.5", "w = s.softmax(-1)")
        draft.add(f"o = torch.einsum('bhgqk,bkhe->b{draft.pick('q' + inner, inner + 'q')}e', w, v)")
    draft.outputs.append("o")


def contractions(draft: Draft) -> None:
    operands.operands(draft, most=1)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    scores.product(draft, "swapped", "turned", "einsum", "einsum", "bmm", "baddbmm", "baddbmm", "dots", "summed")
    scores.steps(draft, 0, 1)
    weights.softmax(draft, changes=0)
    weights.values(draft)
    weights.after(draft, most=1)


def strides(draft: Draft) -> None:
    """Inputs that do not lie contiguous, and outputs whose strides are asked for, written and viewed."""
    draft.layouts = True
    draft.writes = draft.maybe()
    operands.operands(draft, most=1)
    draft.pick(lambda d: simple_site(d, *([d.pick(scores.bias, scores.mask)] if d.maybe() else [])), calls.called)(
        draft
    )
    weights.after(draft, least=1, most=3)


def symbolic(draft: Draft) -> None:
    """Sizes that are symbols, and a second call with others."""
    operands.operands(draft, most=2)
    draft.pick(
        lambda d: simple_site(
            d, *(d.pick(scores.mask, scores.bias, scores.positional, scores.turn) for _ in range(d.number(0, 2)))
        ),
        calls.called,
    )(draft)
    weights.after(draft, most=1)


def halves(draft: Draft) -> None:
    """bfloat16 and float16, with small and large scores."""
    draft.dtype = draft.pick(*HALF)
    draft.sizes["d"] = draft.pick(4, 16, 64)
    operands.operands(draft, most=1)
    draft.pick(
        lambda d: simple_site(
            d,
            *(d.pick(scores.mask, scores.bias, scores.turn, scores.cap) for _ in range(d.number(0, 2))),
            product=d.pick("matmul", "upcast"),
        ),
        calls.called,
        calls.called,
    )(draft)
    weights.after(draft, most=1)


def sdpa_calls(draft: Draft) -> None:
    operands.operands(draft, most=2)
    calls.called(draft)
    weights.after(draft)


def cross(draft: Draft) -> None:
    """More keys than queries, or fewer; k and v of other lengths and head dims than q."""
    draft.sizes["q"], draft.sizes["k"] = draft.pick((3, 7), (7, 3), (1, 6), (6, 1), (4, 5))
    draft.sizes["e"] = draft.pick(3, 8)
    operands.operands(draft, most=1)
    draft.pick(
        lambda d: simple_site(d, scores.mask),
        lambda d: simple_site(d, diagonal),
        lambda d: simple_site(d, diagonal),
        calls.called,
    )(draft)
    weights.after(draft, most=1)


def diagonal(draft: Draft) -> None:
    """Causal masks of a rectangle, which begin top left or end bottom right."""
    conditions.positions(draft)
    masks.apply(
        draft,
        masks.placed(
            draft,
            draft.pick("(i >= j)", "(j <= i + (m - n))", "(i + m - n >= j)", "(n - i <= m - j)")
            if draft.sizes["q"] <= draft.sizes["k"]
            else draft.pick("(i >= j)", "((j <= i + (m - n)) | (j == 0))"),
        ),
        draft.pick("-inf", "-1e9"),
    )


def boundaries(draft: Draft) -> None:
    """Sizes of 0 and 1, and next to powers of two."""
    for name in ("b", "q", "k", "d"):
        if draft.maybe():
            draft.sizes[name] = draft.pick(
                *((0, 1) if name == "b" else (0, 1, 1, 15, 17, 33) if name != "d" else (1, 7, 9, 17))
            )
    draft.sizes["e"] = draft.pick(draft.sizes["d"], 1, 5)
    operands.operands(draft, most=1)
    draft.pick(
        lambda d: simple_site(
            d,
            *(d.pick(scores.mask, scores.bias, scores.positional, scores.scale) for _ in range(d.number(0, 2))),
            product=d.pick("matmul", "bmm", "bmm"),
        ),
        calls.called,
    )(draft)
    weights.after(draft, most=1)
