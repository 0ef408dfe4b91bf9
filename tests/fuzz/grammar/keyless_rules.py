"""Queries that a mask leaves no key: such a row is what the model's own softmax makes of it."""

from __future__ import annotations

from tests.fuzz.grammar import conditions, operands
from tests.fuzz.grammar.draft import Draft


def rows_without_keys(draft: Draft) -> None:
    """Scores that are all one finite number weigh all keys alike, wherever the number comes from. No probe discards such a program."""
    operands.plain_operands(draft)
    draft.dims = ("b", "h", "q", "k")
    conditions.positions(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    draft.add(f"c = {_mask(draft)}")
    number = draft.pick("torch.finfo(q.dtype).min", "torch.finfo(q.dtype).min", "-1e9")
    lowest = "torch.where(c, torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)"
    weighed = "w = s.softmax(-1)", f"o = {draft.pick('w @ v', 'torch.matmul(w, v)')}"
    call = "o = F.scaled_dot_product_attention(q, k, v, attn_mask={})"
    draft.add(
        *draft.pick(
            (f"s = (q @ k.mT * 0.5).masked_fill(~c, {number})", *weighed),
            (f"s = torch.where(c, q @ k.mT * 0.5, {number})", *weighed),
            (f"s = q @ k.mT * 0.5 + {lowest}", *weighed),
            (call.format(lowest),),
            (call.format("c"),),
        )
    )
    draft.outputs.append("o")


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
        return f"({pad} & (torch.arange(q.shape[0])[:, None] > 0))[:, None, None, :]"
    of_queries = draft.new("pad", ("b", "q"), "padding")
    return f"{pad}[:, None, None, :] & {of_queries}.bool()[:, None, :, None]"
