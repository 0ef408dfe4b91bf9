"""A rule about sizes that are expressions: lengths and batches that are computed, and sizes that are alike in the first call alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.grammar import calls, operand_rules, operands, scores, weights
from tests.fuzz.grammar.draft import Draft
from tests.fuzz.grammar.site import simple_site

_Size = Callable[[int, int], int]


@dataclass(frozen=True, kw_only=True)
class _Form:
    """text: of {x}, (B, H, S, D), and a number {c}. size: the length that it makes of S and c."""

    text: str
    size: _Size


_CONVOLVED = (
    "F.conv2d({x}.flatten(0, 1)[:, None], torch.full((1, 1, 3, 1), 0.5, dtype=D, device={x}.device), stride=({c}, 1), padding=(1, 0))"
    ".squeeze(1).unflatten(0, {x}.shape[:2])"
)
#: how the length of q, or of k and v, comes from a size of an input
LENGTHS = (
    _Form(text="{x}[:, :, : {x}.shape[2] // {c}]", size=lambda s, c: s // c),
    _Form(text="{x}[:, :, : ({x}.shape[2] + 1) // {c}]", size=lambda s, c: min((s + 1) // c, s)),
    _Form(text="{x}[:, :, : {x}.shape[2] // {c} + 1]", size=lambda s, c: min(s // c + 1, s)),
    _Form(text="{x}[:, :, ::{c}]", size=lambda s, c: (s + c - 1) // c),
    _Form(text="{x}[:, :, 1::{c}]", size=lambda s, c: (s + c - 2) // c),
    _Form(text="{x}[:, :, {c}:]", size=lambda s, c: s - c),
    _Form(text="{x}[:, :, :-1]", size=lambda s, c: s - 1),
    _Form(text="{x}[:, :, -{c}:]", size=lambda s, c: min(s, c)),
    _Form(text="{x}[:, :, : min({x}.shape[2], {c})]", size=lambda s, c: min(s, c)),
    _Form(text="{x}[:, :, : {x}.shape[2] - {x}.shape[2] % {c}]", size=lambda s, c: s - s % c),
    _Form(text="F.pad({x}, (0, 0, 0, -{x}.shape[2] % {c}))", size=lambda s, c: s + -s % c),
    _Form(text="F.pad({x}, (0, 0, 0, max({c} + 2 - {x}.shape[2], 0)))", size=lambda s, c: max(s, c + 2)),
    _Form(text="{x}.repeat(1, 1, {c}, 1)", size=lambda s, c: s * c),
    _Form(text="{x}.repeat_interleave({c}, 2)", size=lambda s, c: s * c),
    _Form(text="torch.cat([{x}[:, :, :{c}], {x}], 2)", size=lambda s, c: s + min(s, c)),
    _Form(text="torch.cat([{x}[:, :, :1], {x}[:, :, ::{c}]], 2)", size=lambda s, c: 1 + (s + c - 1) // c),
    _Form(text="F.avg_pool2d({x}, ({c}, 1))", size=lambda s, c: s // c),
    _Form(text=_CONVOLVED, size=lambda s, c: (s - 1) // c + 1),
    _Form(text="{x}.unfold(2, {c}, {c}).mean(-1)", size=lambda s, c: s // c),
    _Form(text="{x}[:, :, : {x}.shape[2] // {c} * {c}].unflatten(2, (-1, {c})).amax(3)", size=lambda s, c: s // c),
    _Form(text="F.interpolate({x}, scale_factor=({c}, 1))", size=lambda s, c: s * c),
    _Form(text="({x}[:, :, :, None] + {x}[:, :, None]).flatten(2, 3)", size=lambda s, c: s * s),
    _Form(text="({x}[:, :, :, None] * {x}[:, :, None, :{c}]).flatten(2, 3)", size=lambda s, c: s * min(s, c)),
)
#: how the batch and the length come from those of an input, for q, k and v alike: (text, batch, length)
BATCHES: tuple[tuple[str, _Size, _Size], ...] = (
    ("{x}.repeat({c}, 1, 1, 1)", lambda b, c: b * c, lambda s, c: s),
    ("torch.cat([{x}] * {c})", lambda b, c: b * c, lambda s, c: s),
    ("{x}.repeat_interleave({c}, 0)", lambda b, c: b * c, lambda s, c: s),
    ("{x}[:, None].expand(-1, {c}, -1, -1, -1).flatten(0, 1)", lambda b, c: b * c, lambda s, c: s),
    ("{x}.unflatten(2, ({c}, -1)).transpose(1, 2).flatten(0, 1)", lambda b, c: b * c, lambda s, c: s // c),
    ("{x}.unflatten(2, (-1, {c})).permute(0, 3, 1, 2, 4).flatten(0, 1)", lambda b, c: b * c, lambda s, c: s // c),
    ("torch.cat({x}.chunk({c}, 2))", lambda b, c: b * c, lambda s, c: s // c),
    ("{x}[: {x}.shape[0] // {c} + 1]", lambda b, c: min(b // c + 1, b), lambda s, c: s),
)


def sizes_as_expressions(draft: Draft) -> None:
    """Lengths and batches that are computed, called at a second and mostly a third size."""
    form = draft.pick(_of_one_size, _of_one_size, _of_batches, _alike_at_first)
    plan = form(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    steps = (scores.mask, scores.mask, scores.usual_mask, scores.bias, scores.positional)
    if form is _alike_at_first and draft.maybe():
        # A diagonal that ends bottom right is causal, and a rectangle a square, for the first sizes alone.
        simple_site(draft, operand_rules.diagonal)
    elif draft.maybe(4):
        calls.called(draft)
    else:
        simple_site(
            draft,
            *(draft.pick(*steps) for _ in range(draft.number(0, 2))),
            product=draft.pick("matmul", "matmul", "bmm", "swapped"),
        )
    weights.after(draft, most=1)
    draft.others, draft.third = plan(), plan() if not draft.maybe(3) else {}


def _of_one_size(draft: Draft) -> Callable[[], dict[str, int]]:
    """q from one size, k and v from it, too, or from another one, or as they come."""
    q, k = draft.pick(*LENGTHS), draft.pick(*LENGTHS)
    k = q if draft.maybe() else k
    c, e = draft.number(2, 4), draft.number(2, 3)
    e = c if k is q else e
    shares = k is q or draft.maybe(3)
    first = {"t": draft.pick(4, 6, 8, 5), "u": draft.pick(6, 4, 8, 3)}

    def sizes(given: dict[str, int]) -> dict[str, int]:
        lengths = {"q": q.size(given["t"], c), "k": k.size(given["t" if shares else "u"], e)}
        return {**draft.sizes, **given, **{name: max(n, 0) for name, n in lengths.items()}}

    draft.sizes.update(sizes(first))
    other = "t" if shares else "u"
    for name, heads, length, width, own, number in (
        ("q", "h", "t", "d", q, c),
        ("k", "kv", other, "d", k, e),
        ("v", "kv", other, "e", k, e),
    ):
        x = draft.new(name, ("b", heads, length, width), grad=draft.grads)
        draft.add(f"{name} = {own.text.format(x=x, c=number)}")

    def again() -> dict[str, int]:
        more = (9, 12, 7, 3, 2, 10, 1, 0)
        return sizes({"t": draft.pick(*more), "u": draft.pick(*more)}) | {"b": draft.pick(draft.sizes["b"], 3, 1)}

    return again


def _of_batches(draft: Draft) -> Callable[[], dict[str, int]]:
    text, batch, shorter = draft.pick(*BATCHES)
    c = draft.number(2, 3)
    first = {"rows": draft.pick(2, 1, 3), "t": c * draft.pick(2, 3, 4), "u": c * draft.pick(3, 2)}
    same = draft.maybe()

    def sizes(given: dict[str, int]) -> dict[str, int]:
        of_k = given["t" if same else "u"]
        return {
            **draft.sizes,
            **given,
            "b": batch(given["rows"], c),
            "q": shorter(given["t"], c),
            "k": shorter(of_k, c),
        }

    draft.sizes.update(sizes(first))
    key = "t" if same else "u"
    for name, heads, length, width in (("q", "h", "t", "d"), ("k", "kv", key, "d"), ("v", "kv", key, "e")):
        x = draft.new(name, ("rows", heads, length, width), grad=draft.grads)
        draft.add(f"{name} = {text.format(x=x, c=c)}")

    def again() -> dict[str, int]:
        return sizes({"rows": draft.pick(4, 1, 3, 0), "t": c * draft.pick(5, 4, 1), "u": c * draft.pick(4, 5, 1)})

    return again


#: two lengths of t and u that are one number now and then: (of q, of k, as text of {q} and {k}, which are as long as t and u)
_PAIRS: tuple[tuple[str, str, _Size, _Size], ...] = (
    ("{q}", "{k}", lambda t, u: t, lambda t, u: u),
    ("{q}", "{k}[:, :, ::2]", lambda t, u: t, lambda t, u: (u + 1) // 2),
    ("{q}[:, :, ::2]", "{k}[:, :, : {k}.shape[2] // 2]", lambda t, u: (t + 1) // 2, lambda t, u: u // 2),
    ("{q}[:, :, : {q}.shape[2] // 2]", "{k}[:, :, ::2]", lambda t, u: t // 2, lambda t, u: (u + 1) // 2),
    ("{q}[:, :, 2:]", "{k}[:, :, ::2]", lambda t, u: t - 2, lambda t, u: (u + 1) // 2),
    ("{q}.repeat(1, 1, 2, 1)", "{k}[:, :, 1:]", lambda t, u: 2 * t, lambda t, u: u - 1),
    ("{q}[:, :, :4]", "{k}", lambda t, u: min(t, 4), lambda t, u: u),
    ("F.pad({q}, (0, 0, 0, -{q}.shape[2] % 4))", "{k}", lambda t, u: t + -t % 4, lambda t, u: u),
    ("{q}[:, :, : {q}.shape[2] - {q}.shape[2] % 2]", "{k}", lambda t, u: t - t % 2, lambda t, u: u),
)


def _alike_at_first(draft: Draft) -> Callable[[], dict[str, int]]:
    """Queries and keys, or the axes of a mask, are as many in the first call, and not in the next one."""
    of_q, of_k, queries, keys = draft.pick(*_PAIRS)
    share = draft.maybe(3)
    range_ = (4, 3, 5, 6, 7, 8, 2, 9)
    pairs = [(t, u) for t in range_ for u in ((t,) if share else range_) if queries(t, u) > 0 and keys(t, u) > 0]
    alike = [p for p in pairs if queries(*p) == keys(*p)] or pairs
    other = [p for p in pairs if queries(*p) != keys(*p)] or pairs

    def sizes(pair: tuple[int, int]) -> dict[str, int]:
        return {**draft.sizes, "t": pair[0], "u": pair[1], "q": queries(*pair), "k": keys(*pair)}

    draft.sizes.update(sizes(draft.pick(*alike)))
    given = {"q": draft.new("q", ("b", "h", "t", "d"), grad=draft.grads)}
    for name, width in (("k", "d"), ("v", "e")):
        given[name] = draft.new(name, ("b", "kv", "t" if share else "u", width), grad=draft.grads)
    draft.add(f"q = {of_q.format(q=given['q'])}", *(f"{name} = {of_k.format(k=given[name])}" for name in "kv"))
    return lambda: sizes(draft.pick(*other, *alike[:1]))
