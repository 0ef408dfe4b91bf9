"""Queries that a mask leaves no key: such a row is what the model's own softmax makes of it."""

from __future__ import annotations

from tests.fuzz.grammar import conditions, operands
from tests.fuzz.grammar.draft import Draft

_LOWEST = "torch.finfo(q.dtype).min"
_ADDED = f"torch.where(c, torch.zeros((), dtype=q.dtype), {_LOWEST})"
_CALL = "o = F.scaled_dot_product_attention(q, k, v, attn_mask={})"

#: a condition by an op that no reader of masks knows
_UNREAD = ("c = c.int().square() > 0", "c = c.double().nan_to_num() > 0", "c = c.int().cumprod(-1) > 0")


def rows_without_keys(draft: Draft) -> None:
    """Scores that are all one finite number weigh all keys alike, wherever the number comes from. No probe discards such a program."""
    if draft.maybe(4):
        # One query: decoding.
        draft.sizes["q"] = 1
    is_grouped = draft.maybe(3)
    if is_grouped:
        draft.sizes.update(kv=2, h=draft.pick(4, 6))
    operands.plain_operands(draft)
    draft.dims = ("b", "h", "q", "k")
    conditions.positions(draft)
    for name in ("k", "v"):
        if is_grouped:
            draft.add(f"{name} = {name}.repeat_interleave({draft.sizes['h'] // 2}, 1)")
        else:
            operands.repeat_heads(draft, name)
    draft.add(f"c = {_mask(draft)}")
    if draft.maybe(4):
        draft.add(draft.pick(*_UNREAD))
    number = draft.pick(_LOWEST, _LOWEST, "-1e9")
    weighed = "w = s.softmax(-1)", f"o = {draft.pick('w @ v', 'torch.matmul(w, v)')}"
    forms = [
        (f"s = (q @ k.mT * 0.5).masked_fill(~c, {number})", *weighed),
        (f"s = torch.where(c, q @ k.mT * 0.5, {number})", *weighed),
        (f"s = q @ k.mT * 0.5 + {_ADDED}", *weighed),
        (_CALL.format(_ADDED),),
        (_CALL.format("c"),),
    ]
    if draft.maybe(3):
        forms = [(*_twice(draft), *weighed)]
    draft.add(*draft.pick(*forms))
    draft.outputs.append("o")


def _twice(draft: Draft) -> tuple[str, ...]:
    """Two masks: a pair that both shut out holds the second number, or the sum, and the highest number of a row has all the weight."""
    # Of numbers that are not as low as these a site is left alone.
    first, second = draft.pick((_LOWEST, "-1e30"), ("-1e30", _LOWEST), ("-1e9", "-1e9"), ("-1e9", "-1e5"))
    draft.add(f"c2 = {_mask(draft)}")
    begin = draft.pick(f"s = (q @ k.mT * 0.5).masked_fill(~c, {first})", f"s = q @ k.mT * 0.5 + {_ADDED}")
    end = f"s = s.masked_fill(~c2, {second})", f"s = torch.where(c2, s, {second})"
    return begin, draft.pick(*end)


def _mask(draft: Draft) -> str:
    """(B|1, 1, Sq|1, Skv)"""
    kind = draft.pick("empty", "left", "queries", "queries", "positions", "documents")
    if kind == "positions":
        return str(draft.pick("(j > i)[None, None]", "(i - j >= 2)[None, None]", "((i < 1) & (i >= j))[None, None]"))
    if kind == "documents":
        ids, own = draft.new("ids", ("b", "k"), "ids"), draft.new("ids", ("b", "q"), "ids")
        return f"({own}[:, None, :, None] == {ids}[:, None, None, :])"
    pad = f"{draft.new('pad', ('b', 'k'), 'padding')}.bool()"
    if kind == "left":
        return f"{pad}.flip(1)[:, None, None, :] & (i >= j)"
    if kind == "empty":
        return f"({pad} & (torch.arange(q.shape[0], device=q.device)[:, None] > 0))[:, None, None, :]"
    of_queries = draft.new("pad", ("b", "q"), "padding")
    return f"{pad}[:, None, None, :] & {of_queries}.bool()[:, None, :, None]"
