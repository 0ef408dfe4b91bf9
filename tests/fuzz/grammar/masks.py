"""Masks of every sort, and how they are put on the scores."""

from __future__ import annotations

from tests.fuzz.grammar import algebra
from tests.fuzz.grammar.conditions import condition, positions, rounded, with_a_key, wrapped
from tests.fuzz.grammar.draft import Draft
from tests.fuzz.grammar.made_masks import made, of_tensors, written

#: how what is shut out is filled
FILLS = ("-inf", "torch.finfo(s.dtype).min", "-1e9", "-65504.0", "-1e5", "-30000.0", "-1e4", "-inf")


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
    forms = [condition, condition, made, made, algebra.masks, of_tensors, of_tensors]
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
    draft.kept.append(c)
    forms = [
        f"s = s.masked_fill(~{c}, {fill})",
        f"s = torch.where({c}, s, torch.full_like(s, {fill}))",
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
            f"t = {c}.to(s.dtype); s = s * t + {fill} * (1 - t)",
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
