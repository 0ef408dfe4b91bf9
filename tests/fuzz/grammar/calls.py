"""Calls of scaled_dot_product_attention."""

from __future__ import annotations

import torch

from tests.fuzz.grammar import conditions, made_masks, masks
from tests.fuzz.grammar.draft import Draft
from tests.fuzz.grammar.operands import repeat_heads


def called(draft: Draft) -> None:
    """`o` from a call with some of its arguments."""
    grouped = draft.maybe()
    if not grouped:
        repeat_heads(draft, "k")
        repeat_heads(draft, "v")
    given = ["enable_gqa=True"] if grouped else []
    if draft.maybe():
        given.append(f"scale={draft.pick('0.3', '1.0', '-0.5', '2.0', 'q.shape[-1] ** -0.5')}")
    if draft.maybe(4):
        given.append("dropout_p=0.0")
    draft.dims = ("b", "h", "q", "k")
    mask = draft.pick("none", "causal", "causal", "kept", "bias", "read", "read", "float", "float")
    if mask == "causal":
        given.append(draft.pick("is_causal=True", "is_causal=True", "is_causal=q.shape[2] > 1"))
    elif mask == "kept":
        if draft.maybe():
            conditions.positions(draft)
            given.append(f"attn_mask={draft.pick(*conditions.USUAL)}")
        else:
            given.append(f"attn_mask={made_masks.term(draft, 'kept', least=2)}")
    elif mask == "bias":
        term = made_masks.term(draft, "normal", least=2)
        given.append(f"attn_mask={term}")
        if draft.writes and draft.maybe(3):
            draft.last.append(f"{term}.data.add_(1)")
    elif mask in ("read", "float"):
        draft.add(f"c = {masks.any_condition(draft)}")
        if mask == "float":
            fill = draft.pick("-inf", "torch.finfo(D).min", "-1e4", "-1e9" if draft.dtype != torch.float16 else "-inf")
            draft.add(
                draft.pick(
                    "c = torch.where(c, 0.0, {}).to(D)",
                    "c = torch.zeros(c.shape, dtype=D, device=c.device).masked_fill(~c, {})",
                ).format(fill)
            )
            draft.add(
                f"# probe: c.expand(*q.shape[:3], k.shape[2]).amax(-1) if {'False' if fill == '-inf' else 'True'} else torch.zeros(1)"
            )
        given.append("attn_mask=c")
    call = "F.scaled_dot_product_attention"
    order = draft.pick("q, k, v", "q, k, v", "query=q, key=k, value=v")
    draft.add(f"o = {call}({order}{''.join(', ' + g for g in given)})")
