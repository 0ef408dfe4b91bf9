"""Rules about scores: steps, sinks, kinds of what is added, fills, and what is one thing off."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.grammar import conditions, made_masks, masks, operands, scores, weights
from tests.fuzz.grammar.draft import Draft
from tests.fuzz.grammar.site import simple_site


def score_steps(draft: Draft) -> None:
    """Scales, caps, shifts, clamps and casts in any order, over scores of any size."""
    operands.plain_operands(draft)
    names = (
        scores.scale,
        scores.scale,
        scores.cap,
        scores.shift,
        scores.shift,
        scores.clamp,
        scores.bias,
        scores.turn,
        scores.enlarge,
        scores.mask,
    )
    simple_site(
        draft,
        *(draft.pick(*names) for _ in range(draft.number(1, 4))),
        product=draft.pick("matmul", "matmul", "swapped"),
    )
    weights.after(draft, most=1)


def sinks(draft: Draft) -> None:
    operands.plain_operands(draft)
    operands.repeat_heads(draft, "k")
    operands.repeat_heads(draft, "v")
    scores.product(draft, "matmul")
    draft.both(
        *(
            draft.pick(scores.scale, scores.mask, scores.cap, scores.bias, scores.shift, scores.shift)
            for _ in range(draft.number(0, 3))
        )
    )
    if draft.maybe():
        weights.with_a_sink(draft)
    else:
        weights.softmax(draft, sink=True)
        weights.values(draft)
    draft.outputs.append("o")


def fills(draft: Draft) -> None:
    """Finite numbers that mask until something lifts them."""
    operands.plain_operands(draft)
    extra = [scores.bias] if draft.maybe(4) else []
    simple_site(draft, scores.lifted, *extra)
    draft.outputs.append("o")


def score_kinds(draft: Draft) -> None:
    """Slopes, tables, buckets and penalties, alone and together."""
    operands.plain_operands(draft)
    usual = scores.usual_mask
    more = draft.pick((), (usual,), (usual,), (scores.mask,), (scores.positional,), (scores.scale,), (scores.cap,))
    simple_site(draft, scores.positional, *more)
    draft.outputs.append("o")


def near_misses(draft: Draft) -> None:
    """One thing off: the softmax's axis, another reader of scores or weights, a product over another axis."""
    if draft.maybe():
        _one_thing_off(draft)
        return
    operands.operands(draft, most=1)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    scores.product(draft)
    draft.both(
        *(
            draft.pick(scores.look, scores.turn, scores.clamp, scores.scale, scores.cap, scores.shift)
            for _ in range(draft.number(0, 3))
        )
    )
    draft.causal_allowed = draft.maybe()
    weights.softmax(draft, changes=2)
    if draft.maybe(4):
        # A part of the weights: of the queries, of the heads, of the batch.
        parts = [":, " * draft.at(axis) + draft.pick("1:", ":1", ":-1") for axis in draft.dims if "k" not in axis]
        draft.add(f"w = w[{draft.pick(*parts)}]")
    if draft.dims == ("b", "h", "q", "k") and draft.sizes["q"] == draft.sizes["k"] and draft.maybe():
        draft.add(
            draft.pick("o = w.mT @ v", "o = torch.einsum('bhqk,bhqd->bhkd', w, v)", "o = w.transpose(2, 3).matmul(v)")
        )
    else:
        weights.values(draft)
    weights.after(draft)


def _one_thing_off(draft: Draft) -> None:
    """A plain site in which one thing is not as in attention."""
    operands.plain_operands(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    product, shifted, weights_of, output = "s = q @ k.mT * 0.5", "", "s.softmax(-1)", "o = w @ v"
    at = draft.pick(-2, -2, 1, 0)
    what = draft.pick("softmax", "softmax", "shift", "turned", "part", "product", "twice")
    if what == "softmax":
        forms = (
            "s.softmax({})",
            "torch.softmax(s, {})",
            "torch.special.softmax(s, {})",
            "torch.special.softmax(s, {})",
        )
        weights_of = draft.pick(*forms).format(at)
    elif what == "shift":
        shifted = f"s = s - s.{draft.pick('amax({}, keepdim=True)', 'max({}, keepdim=True)[0]')}".format(at)
    elif what == "turned":
        # The keys come before the queries.
        product, weights_of, output = "s = k @ q.mT * 0.5", "s.softmax(2)", "o = w.mT @ v"
        shifted = draft.pick("s = s - s.amax(-1, keepdim=True)", "s = s - s.max(-1, keepdim=True).values")
    elif what == "part":
        output = f"o = w[{draft.pick(':1', '-1:', ':, :1', ':, :, :1', ':, :, 1:', '..., :1')}] @ v"
    elif what == "product":
        output = draft.pick(
            "o = w.mT @ v", "o = torch.einsum('bhqk,bhqd->bhkd', w, v)", "o = (w + w) @ v", "o = (w * w) @ v"
        )
    else:
        output = draft.pick("seen = w.mT @ v; o = w @ v", "seen = s.exp(); o = w @ v", "seen = w @ v; o = w.mT @ v")
        draft.outputs.append("seen")
    draft.add(*(line for line in (product, shifted, f"w = {weights_of}", output) if line))
    draft.outputs.append("o")


def tiles(draft: Draft) -> None:
    """What a kernel that goes by tiles applies itself: documents, distances, caps, sinks, over several tiles."""
    _several_tiles(draft)
    first = draft.pick(_known, _of_tensors, _documents, scores.slopes, scores.slopes, scores.positional, scores.cap)
    more = draft.pick((), (), (scores.cap,), (scores.scale,), (scores.bias,), (scores.positional,), (_known,))
    # A cap or a scale behind what is added has no kind.
    simple_site(draft, *draft.pick((*more, first), (*more, first), (first, *more)), sink=draft.maybe(4))
    draft.outputs.append("o")


def intervals(draft: Draft) -> None:
    """The same of masks alone: bands, bounds, chunks and documents, one of them or two."""
    if draft.sizes["q"] > draft.sizes["k"] and not draft.maybe(4):
        # Most of these leave the last queries without a key otherwise.
        draft.sizes["k"] = draft.sizes["q"]
    _several_tiles(draft)
    first = draft.pick(_band, _band, _intervals, _intervals, _documents, _documents, _known)
    more = draft.pick((), (), (), (_band,), (_intervals,), (scores.positional,), (_of_tensors,))
    simple_site(draft, first, *more)
    draft.outputs.append("o")


def _several_tiles(draft: Draft) -> None:
    if draft.maybe():
        draft.sizes["q"], draft.sizes["k"] = draft.pick((17, 17), (16, 40), (33, 33), (5, 70), (33, 20), (1, 130))
    operands.plain_operands(draft)


def _mask(draft: Draft, kind: Callable[[Draft], str], *fills: str) -> None:
    conditions.positions(draft)
    masks.apply(draft, masks.placed(draft, kind(draft)), draft.pick("-inf", "-inf", *fills))


def _known(draft: Draft) -> None:
    _mask(draft, conditions.known, "-1e9")


def _band(draft: Draft) -> None:
    _mask(draft, conditions.band, "-1e9")


def _intervals(draft: Draft) -> None:
    _mask(draft, made_masks.intervals, "-1e9")


def _of_tensors(draft: Draft) -> None:
    _mask(draft, made_masks.of_tensors)


def _documents(draft: Draft) -> None:
    _mask(draft, made_masks.documents)
