"""Whole sites, which every rule is made of: from q, k and v to `o`."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.grammar import conditions, masks, operands, scores, weights
from tests.fuzz.grammar.draft import Draft


def site(draft: Draft, *, most_steps: int = 3, steps: Callable[[Draft], None] | None = None) -> None:
    """From q, k and v to `o`, written out."""
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    scores.product(draft)
    if steps is None:
        scores.steps(draft, 0, most_steps)
    else:
        steps(draft)
    weights.softmax(draft)
    weights.values(draft)


def simple_site(
    draft: Draft, *steps: Callable[[Draft], None], product: str = "matmul", sink: bool | None = False
) -> None:
    """A site whose parts are plain but for these steps on the scores."""
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    scores.product(draft, product)
    if draft.maybe():
        draft.add("s = s * 0.5")
    draft.both(*steps)
    weights.softmax(draft, sink=sink, changes=0)
    weights.values(draft)


def sites_with(draft: Draft, *forms: Callable[[Draft], str]) -> None:
    """Up to three sites, each with a mask of its own: of one that is read, what is wrong shows."""
    operands.plain_operands(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    draft.dims = ("b", "h", "q", "k")
    conditions.positions(draft)
    for _ in range(draft.number(1, 3)):
        form = draft.pick(*forms)
        made = form(draft)
        # Of several kinds, joined by `or`, a kernel knows nothing; a band mostly has a key by itself.
        is_left = draft.maybe(3) or (form is conditions.band and draft.maybe())
        allowed = made if is_left else conditions.with_a_key(draft, made)
        out = draft.name("o")
        if draft.maybe(3):
            draft.add(f"{out} = F.scaled_dot_product_attention(q, k, v, attn_mask={allowed})")
        else:
            draft.add(f"s = q @ k.mT * {draft.pick('0.5', '0.5', '-0.5')}")
            masks.apply(draft, allowed)
            draft.add("# probe: s.amax(3), s.amin(3)", f"{out} = s.softmax(-1) @ v")
        draft.outputs.append(out)
