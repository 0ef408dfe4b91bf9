"""Rules about what surrounds a site: later writes, gradients, the caller, checkpoints, autocast, other sites."""

from __future__ import annotations

import torch

from tests.fuzz.grammar import calls, masks, operands, scores, weights
from tests.fuzz.grammar.draft import Draft
from tests.fuzz.grammar.site import simple_site, site


def roots(draft: Draft) -> None:
    """Operands, masks and biases are read above copies and scales; what they were made of is written later."""
    draft.writes = True
    operands.operands(draft, most=3)
    for name in draft.pick((), ("k",), ("q",), ("v", "k")):
        operands.write_root(draft, name)
    if draft.maybe(3):
        calls.called(draft)
    else:
        simple_site(
            draft,
            *([draft.pick(scores.bias, scores.mask, scores.positional)] if draft.maybe() else []),
            sink=draft.maybe(4),
        )
    for _ in range(draft.number(1, 2)):
        operands.write_later(draft)
    draft.outputs.append("o")


def gradients(draft: Draft) -> None:
    """Gradients that are stopped, partly wanted, or reach a mask."""
    draft.grads = True
    if draft.maybe(3):
        # Some of the three are known numbers, and the weights or the whole of it are made without gradients.
        _partly_wanted(draft)
        return
    operands.operands(draft, most=3)
    if draft.maybe():
        for name in ("k", "v"):
            operands.repeat_heads(draft, name)
        scores.product(draft)
        draft.both(
            *(
                draft.pick(scores.stop, scores.bias, scores.positional, scores.scale, scores.shift)
                for _ in range(draft.number(1, 3))
            )
        )
        weights.softmax(draft)
        weights.values(draft)
    elif draft.maybe():
        with draft.block("with torch.no_grad():"):
            draft.pick(site, calls.called)(draft)
        draft.add("o = o + q.sum()" if draft.maybe() else "o = o * 2")
    else:
        calls.called(draft)
    weights.after(draft, most=1)


def _partly_wanted(draft: Draft) -> None:
    for name, heads, length, width in (("q", "h", "q", "d"), ("k", "kv", "k", "d"), ("v", "kv", "k", "e")):
        draft.add(f"{name} = {draft.new(name, ('b', heads, length, width), grad=draft.maybe())}")
        if heads == "kv":
            operands.repeat_heads(draft, name)
    scores.product(draft, "matmul", "einsum")
    if draft.maybe():
        with draft.block("with torch.no_grad():"):
            draft.both(*([draft.pick(scores.scale, scores.bias)] if draft.maybe() else []))
            weights.softmax(draft, sink=False, changes=0)
    else:
        draft.both(*([draft.pick(scores.stop, scores.bias)] if draft.maybe() else []))
        weights.softmax(draft, sink=False, changes=1)
    weights.values(draft)
    weights.after(draft, most=1)
    # A program without any gradient says nothing here.
    draft.add(f"other = {draft.new('x', ('q',), grad=True)} * 2")
    draft.outputs.append("other")


def caller_writes(draft: Draft) -> None:
    """The caller writes to inputs and outputs between forward and backward."""
    draft.grads = True
    operands.operands(draft, most=2)
    draft.pick(
        lambda d: simple_site(d, *([d.pick(scores.bias, scores.positional, scores.mask)] if d.maybe() else [])),
        calls.called,
    )(draft)
    weights.after(draft, most=1)
    for _ in range(draft.number(1, 2)):
        names = ["out[-1]", *(i.name for i in draft.inputs if i.kind in ("normal", "large", "small", "padding"))]
        target = draft.pick(*names, "out[-1]", "out[-1]")
        forms = ["{0}.data.mul_(2)", "{0}.data.zero_()", "{0}.data.add_(1)", "{0}.detach().mul_(2)"]
        forms += ["{0}.mul_(2)", "F.relu_({0})", "{0}.add_(1)"] if target == "out[-1]" else ["{0}.add_(1)"]
        draft.after.append(draft.pick(*forms).format(target))


def checkpoints(draft: Draft) -> None:
    """Bodies of checkpoints, once or several times, with masks from within and without."""
    operands.plain_operands(draft)
    draft.dims = ("b", "h", "q", "k")
    outside = None
    if draft.maybe():
        outside = draft.name("c")
        draft.add(f"{outside} = {masks.any_condition(draft)}")
    with draft.block("def body(q, k, v" + (f", {outside}):" if outside else "):")):
        if outside:
            draft.add(
                "n, m = q.shape[2], k.shape[2]",
                "i, j = torch.arange(n, device=q.device)[:, None], torch.arange(m, device=q.device)[None, :]",
            )
            for name in ("k", "v"):
                operands.repeat_heads(draft, name)
            if draft.maybe(3):
                draft.add(f"o = F.scaled_dot_product_attention(q, k, v, attn_mask={outside})")
            else:
                draft.add("s = q @ k.mT * 0.5")
                masks.apply(draft, outside, "-inf")
                draft.add("w = s.softmax(-1)", "o = w @ v")
        else:
            draft.pick(site, calls.called)(draft)
        if draft.writes and draft.maybe():
            draft.add("kept = o.detach(); kept.mul_(2); o = o * 1")
        draft.add("return o")
    draft.outputs[:] = []
    given = "q, k, v" + (f", {outside}" if outside else "")
    draft.add(f"o = checkpoint(body, {given}, use_reentrant=False)")
    if draft.maybe(3):
        if outside and draft.writes:
            draft.add(f"{outside} = {outside} & (j < 3) | (j == 0)")
        if draft.sizes["d"] == draft.sizes["e"]:
            draft.add(f"o = checkpoint(body, o, {given[3:]}, use_reentrant=False)")
    draft.outputs.append("o")


def autocast(draft: Draft) -> None:
    """Regions of autocast, with casts in and around them."""
    draft.dtype = torch.float32
    operands.operands(draft, most=1)
    wide = draft.pick("torch.bfloat16", "torch.bfloat16", "torch.float16")
    if draft.maybe(4):
        # No product is in the region: all stays float32, in it and after it.
        with draft.block(f"with torch.autocast(q.device.type, dtype={wide}):"):
            draft.add(
                *draft.pick(
                    ("q = q * 0.5",), ("q, k = q * 2, k + 1",), ("v = v.transpose(1, 2).contiguous().transpose(1, 2)",)
                )
            )
        draft.pick(site, calls.called)(draft)
        draft.outputs.append("o")
        return
    with draft.block(
        f"with torch.autocast(q.device.type, dtype={wide}, enabled={draft.pick(True, True, True, False)}):"
    ):
        draft.pick(site, calls.called)(draft)
        if draft.maybe(4):
            with draft.block("with torch.autocast(q.device.type, enabled=False):"):
                draft.add("o = o.float() * 2")
    draft.add(draft.pick("o = o.to(D)", "o = o * 1"))
    if draft.maybe():
        # After the region all is float32 again.
        draft.add("first = o", "q, k = q.float(), k.float()")
        draft.outputs.append("first")
        simple_site(draft, scores.scale)
    draft.outputs.append("o")


def two_sites(draft: Draft) -> None:
    """Several sites in one graph that share operands, masks or results."""
    operands.plain_operands(draft)
    if draft.maybe():
        _same_term(draft)
        return
    if draft.maybe():
        draft.pick(site, calls.called)(draft)
    else:
        simple_site(draft, scores.mask)
    draft.add("first = o")
    if draft.writes and draft.maybe():
        operands.write_later(draft)
    same = draft.sizes["d"] == draft.sizes["e"]
    draft.add(draft.pick("q = q * 0.5", "q = o" if same else "q = q + 1", "v = v * 2", "q = q.flip(1)"))
    draft.causal_allowed = True
    draft.pick(site, calls.called, lambda d: simple_site(d, scores.mask))(draft)
    draft.outputs += ["first", "o"]


#: the last two axes exchanged, by a view of what there is, and by a copy, above which the first of the two is read
_TURNED = (".mT", ".contiguous().mT", ".mT.contiguous()", ".mT.clone()", ".clone().transpose(-1, -2)")


def _same_term(draft: Draft) -> None:
    """One tensor joins the scores of two sites, each time in another way, or along other axes: mostly one thing differs alone."""
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    draft.dims = ("b", "h", "q", "k")
    square = draft.sizes["q"] == draft.sizes["k"]
    if draft.maybe(3):
        term = draft.new("m", draft.pick(("q", "k"), ("b", 1, "q", "k")), "split")
        if draft.maybe():
            draft.add(f"c = {draft.pick('~{}', '{}.logical_not()', '{}.clone()').format(term)}")
            term = "c"
        ways = ["s.masked_fill({}, -inf)", "torch.where({}, s, -inf)", "torch.where({}, -inf, s)"] * 2
        ways += ["s.masked_fill(~{}, -1e4)", "s.masked_fill(~{}, -inf)", "s + {}"]
    else:
        term = draft.new("m", draft.pick(("q", "k"), ("b", 1, "q", "k"), ("h", "q", "k"), ("b", "h", "q", "k")))
        ways = ["s + {}", "s - {}", "torch.add(s, {}, alpha=0.5)", "(s + {}) * 2", "{} + s", "(s - {}) * -1.5"]
    # The scores as they are, or with the axes of one size exchanged.
    turns = [("s", -1, "w")] * 2 + ([("s.mT", -2, "w.mT")] if square else [])
    turns += [("s.transpose(0, 1)", -1, "w.transpose(0, 1)")] if draft.sizes["b"] == draft.sizes["h"] else []
    axes = [*[""] * 8, *(_TURNED if square else ())]
    choices = {"way": ways, "turn": turns, "axes": axes}
    chosen = {name: draft.pick(*options) for name, options in choices.items()}
    for out in ("first", "o"):
        turned, at, back = chosen["turn"]
        way = chosen["way"].format(term + chosen["axes"])
        draft.add("s = q @ k.mT * 0.5", f"s = {turned}" if turned != "s" else "", f"s = {way}")
        draft.add(f"# probe: s.amax({at}), s.amin({at})", f"w = s.softmax({at})", f"{out} = {back} @ v")
        draft.outputs.append(out)
        if draft.writes and draft.maybe(3):
            draft.add(draft.pick(f"{term}.copy_({term}.flip(-1))", "q = q + 1"))
        for name in draft.pick(("way",), ("way",), ("axes",), ("turn",), ("way", "axes", "turn")):
            chosen[name] = draft.pick(*choices[name])
