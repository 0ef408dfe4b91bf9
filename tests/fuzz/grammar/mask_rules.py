"""Rules about masks: by positions, by ops, by tensors, by what is written, several of them."""

from __future__ import annotations

import torch

from tests.fuzz.grammar import algebra, conditions, made_masks, masks, operands, scores
from tests.fuzz.grammar.draft import Draft
from tests.fuzz.grammar.site import simple_site, sites_with


def masks_written(draft: Draft) -> None:
    """Masks and lengths that are written in place, before and after they are used, and used twice."""
    draft.writes = True
    operands.plain_operands(draft)
    draft.dims = ("b", "h", "q", "k")
    conditions.positions(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    c = made_masks.written(draft)
    draft.add(f"{c} = {c} | (j == 0)" if draft.maybe() else f"{c}[:, 0] = True")
    fill = draft.pick("-inf", "-1e9", "torch.finfo(s.dtype).min")
    for number in range(draft.number(1, 2)):
        if draft.maybe(3):
            draft.add(f"o{number} = F.scaled_dot_product_attention(q, k, v, attn_mask={c})")
        else:
            draft.add(f"s = q @ k.mT * {draft.pick('0.5', '0.5', '-0.5')}")
            masks.apply(draft, c, fill)
            draft.add("w = s.softmax(-1)", f"o{number} = w @ v")
        draft.outputs.append(f"o{number}")
        before = list(draft.lines)
        draft.pick(lambda d: None, lambda d: _write_again(d, c), lambda d: _write_again(d, c))(draft)
        if draft.lines == before and draft.maybe():
            operands.write_later(draft)


#: of a mask (n, m) in memory, by which it comes to lie otherwise; PyTorch counts none of them as a write, nor is its memory written to
_LAID_OTHERWISE = (
    "x.data = x.data.mT if x.shape[0] == x.shape[1] else x.data.flip(1)",
    "x.data = x.data.mT if x.shape[0] == x.shape[1] else x.data.flip(1)",
    "x.data = x.data.flip(0)",
)
#: the same, by which it is written or comes to mean another one, and may leave no key
_UNCOUNTED = (
    "x.data.logical_not_()",
    "x.data[:, 1::2] = False",
    "x.data.fill_(False)",
    "x.data.as_strided_(x.shape, x.stride()).logical_not_()",
    "x.untyped_storage().fill_(0)",
    "x.numpy()[:, 1:] = False",
    "torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).logical_not_()",
    "torch._foreach_copy_([x.data], [~x])",
    "x.set_(x.untyped_storage(), 0, x.shape, (1, x.shape[0]))",
)


def masks_known(draft: Draft) -> None:
    """A mask that one graph makes and others use, which the caller writes in between, or only looks at. Autograd would read what is written
    uncounted in a backward that comes later (docs/borders.md)."""
    draft.grads = False
    operands.plain_operands(draft)
    draft.dims = ("b", "h", "q", "k")
    conditions.positions(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    # A band leaves no key to queries behind the last one. No kernel knows a band with a key more by its meaning.
    bands = tuple(f"({band}) | (j == 0)" for band in ("(i - j).abs() < 2", "(i >= j) & (i - j < 3)"))
    condition = draft.pick("i >= j", "i >= j", "j < 2", "j <= i // 2", *bands)
    draft.add(f"c = ({condition}).expand(n, m).clone()")
    for number in range(draft.pick(2, 3, 3)):
        if number:
            # Its first key is for all queries; a write to say so would be one that is seen.
            written = tuple(f"{write}; x.data[:, 0] = True" for write in _UNCOUNTED)
            is_written = number == 1 or draft.maybe(3)
            draft.add(f'apart("{draft.pick(*written, *_LAID_OTHERWISE) if is_written else "x.sum()"}", c)')
        draft.add(f"o{number} = F.scaled_dot_product_attention(q, k, v, attn_mask=c)")
        draft.outputs.append(f"o{number}")


def _write_again(draft: Draft, c: str) -> None:
    forms = (
        f"{c}.fill_(True)",
        f"{c}[:, 1:] = False",
        f"{c}.logical_not_(); {c}[:, 0] = True",
        f"{c}.data.copy_(i >= j)",
        f"{c} |= (i < j)",
        f"{c}.tril_(); {c}[:, 0] = True",
        f"{c} = {c}.clone(); {c}.masked_fill_(i < j, False)",
    )
    draft.add(draft.pick(*forms))


def mask_kinds(draft: Draft) -> None:
    """Masks by comparisons of positions."""
    sites_with(draft, conditions.condition, conditions.condition, conditions.band, _usual, conditions.chunks)


def _usual(draft: Draft) -> str:
    return str(draft.pick(*conditions.USUAL))


def masks_made(draft: Draft) -> None:
    """Masks by ops that move, scan, choose and fill, and by vmap."""
    sites_with(draft, made_masks.made)


def masks_as_algebra(draft: Draft) -> None:
    """Masks by ops that join, move and write elements, by diagonals, and by products of zeros and ones."""
    sites_with(draft, algebra.masks)


def masks_partly_written(draft: Draft) -> None:
    """Masks that are written in part after they were made."""
    draft.writes = True
    sites_with(draft, made_masks.written)


def mask_tensors(draft: Draft) -> None:
    """Masks that ask tensors: padding, documents, lengths, tables."""
    if draft.maybe(3):
        _hidden_keys(draft)
        return
    operands.plain_operands(draft)

    def steps(d: Draft) -> None:
        for _ in range(d.number(1, 2)):
            conditions.positions(d)
            found = made_masks.of_tensors(d)
            masks.apply(d, found if found.startswith("m") else masks.placed(d, found))

    simple_site(draft, steps)
    draft.outputs.append("o")


def _hidden_keys(draft: Draft) -> None:
    """Keys that a mask shuts out are not finite: their scores are replaced. A gradient of q or k would be 0 times NaN in eager, too."""
    draft.grads = False
    operands.plain_operands(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    draft.dims = ("b", "h", "q", "k")
    conditions.positions(draft)
    draft.add(f"p = {draft.new('pad', ('b', 'k'), 'padding')}.bool() & (j[0] < {max(draft.sizes['k'] - 1, 1)})")
    draft.add(f"c = p[:, None, None, :]{draft.pick('', ' & ((i >= j) | (j == 0))')}")
    number = draft.pick("float('nan')", "inf", "-inf", "3e38" if draft.dtype != torch.float16 else "6e4")
    draft.add(f"k = k.masked_fill(~p[:, None, :, None], {number})", "s = q @ k.mT * 0.5")
    fill = draft.pick("-inf", "torch.finfo(s.dtype).min", "-1e9")
    draft.add(draft.pick(f"s = s.masked_fill(~c, {fill})", f"s = torch.where(c, s, {fill})"))
    draft.add("# probe: s.amax(3), s.amin(3)", "o = s.softmax(-1) @ v")
    draft.outputs.append("o")


def several_masks(draft: Draft) -> None:
    operands.plain_operands(draft)
    simple_site(
        draft,
        *([scores.mask] * draft.number(2, 3)),
        *([scores.bias] if draft.maybe() else []),
        product=draft.pick("matmul", "swapped", "bmm"),
    )
    draft.outputs.append("o")


def weights_masked(draft: Draft) -> None:
    """Weights that are masked again: by what the scores were masked with, by its opposite, by another one, or by what it is by then."""
    operands.plain_operands(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    draft.dims = ("b", "h", "q", "k")
    conditions.positions(draft)
    c = draft.name("c")
    draft.add(f"{c} = {draft.pick(*conditions.USUAL)}")
    draft.add("s = q @ k.mT * 0.5")
    masks.apply(draft, c, draft.pick("-inf", "-inf", "-1e9"))
    square = draft.sizes["q"] == draft.sizes["k"]
    again = draft.pick(
        *[c] * 6,
        draft.kept[-1],
        f"~{c}",
        f"(~{c}).logical_not()",
        f"{c}.logical_not()",
        f"{c}.to(w.dtype).bool()",
        f"({c} & {draft.pick(*conditions.USUAL)})",
        str(draft.pick(*conditions.USUAL)),
        f"{c}.mT" if square else f"{c}[:, :1]",
        f"{c}.clone()",
    )
    if draft.maybe():
        # Between the two masks it is written, as a whole or in part.
        draft.add(draft.pick(*_WRITES).format(c))
    draft.add("# probe: s.amax(3), s.amin(3)", draft.pick("w = s.softmax(-1)", "w = F.softmax(s, dim=-1)"))
    if draft.maybe(5):
        draft.add(draft.pick(*_WRITES).format(c))
    draft.add(f"a = {again}" if draft.maybe(4) else "")
    a = "a" if draft.lines[-1].startswith("a = ") else again
    forms = (
        "w = w.masked_fill({0}, 0.0)",
        "w = w.masked_fill(~({0}), 0.0)",
        "w = w.masked_fill(({0}).logical_not(), 0.0)",
        "w = torch.where({0}, w, 0.0)",
        "w = torch.where({0}, w, torch.zeros_like(w))",
        "w = torch.where({0}, 0.0, w)",
        "w = w * {0}",
        "w = w * ({0}).to(w.dtype)",
        "w = ({0}).to(w.dtype) * w",
        "w = w.masked_fill_({0}, 0.0)" if draft.writes and not draft.grads else "w = w.masked_fill({0}, 0)",
    )
    draft.add(draft.pick(*forms).format(a), "o = w @ v")
    draft.outputs.append("o")


#: what a mask holds is changed, by itself or through a view of it
_WRITES = (
    "{0}.logical_not_()",
    "{0}[:, 1:].logical_not_()",
    "{0}[1:] = False",
    "{0}[:, :1] = False",
    "{0}[:1].fill_(True)",
    "{0}.mT.logical_not_()",
    "{0}.view(-1).logical_not_()",
    "{0}.data.logical_not_()",
    "{0}.unsqueeze(0).fill_(True)",
    "{0}.select(1, 0).logical_not_()",
    "{0}.detach()[:, 0] = False",
    "{0}.diagonal().logical_not_()",
)


def integers(draft: Draft) -> None:
    """Whole numbers that wrap, small dtypes, quotients and rests below zero."""
    sites_with(
        draft,
        conditions.wrapped,
        conditions.wrapped,
        conditions.quotients,
        conditions.quotients,
        lambda e: conditions.compared(e, 2),
        conditions.chunks,
    )


def rounding(draft: Draft) -> None:
    """Floats that are compared."""
    sites_with(draft, conditions.rounded)
