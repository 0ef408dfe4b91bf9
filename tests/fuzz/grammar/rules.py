"""One generator for each rule of the passes: `RULES`, by name. Each writes whole programs, with what its rule is about in most of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz.grammar import calls, masks, operands, scores, weights
from tests.fuzz.grammar.draft import Draft
from tests.fuzz.program import Program

Rule = Callable[[Draft], None]

#: rules of which much shows only where what was proved is used: by Triton's kernels, or by the check of the first call
PROOFS = frozenset(
    {
        "mask kinds",
        "masks made",
        "masks partly written",
        "masks written",
        "mask tensors",
        "several masks",
        "integers",
        "rounding",
        "score kinds",
        "fills",
    }
)

#: what a program is compiled with, each as often as it stands here
LOWERINGS: tuple[tuple[str, ...] | None, ...] = (
    ("sdpa_cpu_flash", "reference", "math"),
    ("reference",),
    ("math",),
    ("reference",),
    None,
    ("triton", "reference"),
)
#: the same on a GPU, where most of a half's programs are large enough for every kernel
CUDA_LOWERINGS: tuple[tuple[str, ...] | None, ...] = (
    None,
    ("triton", "reference"),
    ("triton", "math"),
    ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient"),
    ("cudnn", "decode", "sdpa_efficient", "triton"),
    ("math",),
    ("triton", "reference"),
)
HALF = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def _simple_site(
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


def anything(draft: Draft) -> None:
    operands.operands(draft)
    draft.causal_allowed = not draft.maybe(8)
    draft.pick(site, site, calls.called)(draft)
    weights.after(draft)


def views(draft: Draft) -> None:
    """Operands through chains of views, and K/V of fewer heads in every spelling."""
    operands.operands(draft, most=4)
    draft.pick(lambda d: _simple_site(d), lambda d: _simple_site(d, scores.turn, scores.turn), calls.called)(draft)
    weights.after(draft, most=1)


def arrange(draft: Draft) -> None:
    """Axes of the scores in other orders and numbers: 3-D, windows of 5-D, folded batches, broadcast operands."""
    form = draft.pick("windows", "shared", "orders", "orders", "mqa", "groups")
    if form == "orders":
        operands.operands(draft, most=1)
        _simple_site(draft, scores.turn, scores.mask, scores.turn, scores.bias, product="einsum")
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
            draft.add(f"{name} = {name}" if draft.maybe() else f"{name} = {name} * 1")
        draft.dims = ("b", "h", "q", "k")
        draft.add(draft.pick("s = q @ k.mT", "s = torch.matmul(q, k.transpose(-2, -1)) * 0.3"))
        draft.add(
            "n, m = q.shape[2], k.shape[-2]",
            "i, j = torch.arange(n, device=q.device)[:, None], torch.arange(m, device=q.device)[None, :]",
        )
        if draft.maybe():
            masks.apply(draft, masks.placed(draft, f"({draft.pick(*masks.KNOWN)} | (j == 0))"))
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
    scores.product(draft, "swapped", "einsum", "einsum", "bmm", "baddbmm", "baddbmm", "dots", "summed")
    scores.steps(draft, 0, 1)
    weights.softmax(draft, changes=0)
    weights.values(draft)
    weights.after(draft, most=1)


def score_steps(draft: Draft) -> None:
    """Scales, caps, shifts, clamps and casts in any order, over scores of any size."""
    operands.plain_operands(draft)
    names = (
        scores.scale,
        scores.scale,
        scores.cap,
        scores.shift,
        scores.clamp,
        scores.bias,
        scores.turn,
        scores.enlarge,
        scores.mask,
    )
    _simple_site(draft, *(draft.pick(*names) for _ in range(draft.number(1, 4))))
    weights.after(draft, most=1)


def sinks(draft: Draft) -> None:
    operands.plain_operands(draft)
    operands.repeat_heads(draft, "k")
    operands.repeat_heads(draft, "v")
    scores.product(draft, "matmul")
    draft.both(
        *(
            draft.pick(scores.scale, scores.mask, scores.cap, scores.bias, scores.shift)
            for _ in range(draft.number(0, 3))
        )
    )
    weights.softmax(draft, sink=True)
    weights.values(draft)
    draft.outputs.append("o")


def roots(draft: Draft) -> None:
    """Operands, masks and biases are read above copies and scales; what they were made of is written later."""
    draft.writes = True
    operands.operands(draft, most=3)
    if draft.maybe(3):
        calls.called(draft)
    else:
        _simple_site(
            draft,
            *([draft.pick(scores.bias, scores.mask, scores.positional)] if draft.maybe() else []),
            sink=draft.maybe(4),
        )
    for _ in range(draft.number(1, 2)):
        operands.write_later(draft)
    draft.outputs.append("o")


def masks_written(draft: Draft) -> None:
    """Masks and lengths that are written in place, before and after they are used, and used twice."""
    draft.writes = True
    operands.plain_operands(draft)
    draft.dims = ("b", "h", "q", "k")
    masks.positions(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    c = masks.written(draft)
    draft.add(f"{c} = {c} | (j == 0)" if draft.maybe() else f"{c}[:, 0] = True")
    fill = draft.pick("-inf", "-1e9", "torch.finfo(s.dtype).min")
    for number in range(draft.number(1, 2)):
        if draft.maybe(3):
            draft.add(f"o{number} = F.scaled_dot_product_attention(q, k, v, attn_mask={c})")
        else:
            draft.add("s = q @ k.mT * 0.5")
            masks.apply(draft, c, fill)
            draft.add("w = s.softmax(-1)", f"o{number} = w @ v")
        draft.outputs.append(f"o{number}")
        before = list(draft.lines)
        draft.pick(lambda d: None, lambda d: _write_again(d, c), lambda d: _write_again(d, c))(draft)
        if draft.lines == before and draft.maybe():
            operands.write_later(draft)


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


def _sites_with(draft: Draft, *forms: Callable[[Draft], str]) -> None:
    """Up to three sites, each with a mask of its own: of one that is read, what is wrong shows."""
    operands.plain_operands(draft)
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    draft.dims = ("b", "h", "q", "k")
    masks.positions(draft)
    for _ in range(draft.number(1, 3)):
        made = draft.pick(*forms)(draft)
        allowed = masks.with_a_key(draft, made) if not draft.maybe(3) else f"({made} | (j == 0))"
        out = draft.name("o")
        if draft.maybe():
            draft.add(f"{out} = F.scaled_dot_product_attention(q, k, v, attn_mask={allowed})")
        else:
            draft.add("s = q @ k.mT * 0.5")
            masks.apply(draft, allowed)
            draft.add("# probe: s.amax(3)", f"{out} = s.softmax(-1) @ v")
        draft.outputs.append(out)


def mask_kinds(draft: Draft) -> None:
    """Masks by comparisons of positions."""
    _sites_with(draft, masks.condition)


def masks_made(draft: Draft) -> None:
    """Masks by ops that move, scan, choose and fill, and by vmap."""
    _sites_with(draft, masks.made)


def masks_partly_written(draft: Draft) -> None:
    """Masks that are written in part after they were made."""
    draft.writes = True
    _sites_with(draft, masks.written)


def mask_tensors(draft: Draft) -> None:
    """Masks that ask tensors: padding, documents, lengths, tables."""
    operands.plain_operands(draft)

    def steps(d: Draft) -> None:
        for _ in range(d.number(1, 2)):
            masks.positions(d)
            found = masks.of_tensors(d)
            masks.apply(d, found if found.startswith("m") else masks.placed(d, found))

    _simple_site(draft, steps)
    draft.outputs.append("o")


def several_masks(draft: Draft) -> None:
    operands.plain_operands(draft)
    _simple_site(
        draft,
        *([scores.mask] * draft.number(2, 3)),
        *([scores.bias] if draft.maybe() else []),
        product=draft.pick("matmul", "swapped", "bmm"),
    )
    draft.outputs.append("o")


def integers(draft: Draft) -> None:
    """Whole numbers that wrap, small dtypes, quotients and rests below zero."""
    _sites_with(draft, masks.wrapped, masks.wrapped, lambda e: masks.compared(e, 2))


def rounding(draft: Draft) -> None:
    """Floats that are compared."""
    _sites_with(draft, masks.rounded)


def fills(draft: Draft) -> None:
    """Finite numbers that mask until something lifts them."""
    operands.plain_operands(draft)
    extra = [scores.bias] if draft.maybe(4) else []
    _simple_site(draft, scores.lifted, *extra)
    draft.outputs.append("o")


def score_kinds(draft: Draft) -> None:
    """Slopes, tables, buckets and penalties, alone and together."""
    operands.plain_operands(draft)
    more = draft.pick((), (scores.mask,), (scores.positional,), (scores.scale,), (scores.cap,))
    _simple_site(draft, scores.positional, *more)
    draft.outputs.append("o")


def gradients(draft: Draft) -> None:
    """Gradients that are stopped, partly wanted, or reach a mask."""
    draft.grads = True
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


def strides(draft: Draft) -> None:
    """Inputs that do not lie contiguous, and outputs whose strides are asked for, written and viewed."""
    draft.layouts = True
    draft.writes = draft.maybe()
    operands.operands(draft, most=1)
    draft.pick(lambda d: _simple_site(d, *([d.pick(scores.bias, scores.mask)] if d.maybe() else [])), calls.called)(
        draft
    )
    weights.after(draft, least=1, most=3)


def caller_writes(draft: Draft) -> None:
    """The caller writes to inputs and outputs between forward and backward."""
    draft.grads = True
    operands.operands(draft, most=2)
    draft.pick(
        lambda d: _simple_site(d, *([d.pick(scores.bias, scores.positional, scores.mask)] if d.maybe() else [])),
        calls.called,
    )(draft)
    weights.after(draft, most=1)
    for _ in range(draft.number(1, 2)):
        names = ["out[-1]", *(i.name for i in draft.inputs if i.kind in ("normal", "large", "small", "padding"))]
        target = draft.pick(*names, "out[-1]", "out[-1]")
        forms = ["{0}.data.mul_(2)", "{0}.data.zero_()", "{0}.data.add_(1)", "{0}.detach().mul_(2)"]
        forms += ["{0}.mul_(2)", "F.relu_({0})", "{0}.add_(1)"] if target == "out[-1]" else ["{0}.add_(1)"]
        draft.after.append(draft.pick(*forms).format(target))


def symbolic(draft: Draft) -> None:
    """Sizes that are symbols, and a second call with others."""
    operands.operands(draft, most=2)
    draft.pick(
        lambda d: _simple_site(
            d, *(d.pick(scores.mask, scores.bias, scores.positional, scores.turn) for _ in range(d.number(0, 2)))
        ),
        calls.called,
    )(draft)
    weights.after(draft, most=1)


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
        _simple_site(draft, scores.scale)
    draft.outputs.append("o")


def halves(draft: Draft) -> None:
    """bfloat16 and float16, with small and large scores."""
    draft.dtype = draft.pick(*HALF)
    draft.sizes["d"] = draft.pick(4, 16, 64)
    operands.operands(draft, most=1)
    draft.pick(
        lambda d: _simple_site(
            d, *(d.pick(scores.mask, scores.bias, scores.turn, scores.cap) for _ in range(d.number(0, 2)))
        ),
        calls.called,
        calls.called,
    )(draft)
    weights.after(draft, most=1)


def sdpa_calls(draft: Draft) -> None:
    operands.operands(draft, most=2)
    calls.called(draft)
    weights.after(draft)


def two_sites(draft: Draft) -> None:
    """Several sites in one graph that share operands, masks or results."""
    operands.plain_operands(draft)
    if draft.maybe(3):
        _same_term(draft)
        return
    if draft.maybe():
        draft.pick(site, calls.called)(draft)
    else:
        _simple_site(draft, scores.mask)
    draft.add("first = o")
    if draft.writes and draft.maybe():
        operands.write_later(draft)
    same = draft.sizes["d"] == draft.sizes["e"]
    draft.add(draft.pick("q = q * 0.5", "q = o" if same else "q = q + 1", "v = v * 2", "q = q.flip(1)"))
    draft.causal_allowed = True
    draft.pick(site, calls.called, lambda d: _simple_site(d, scores.mask))(draft)
    draft.outputs += ["first", "o"]


def _same_term(draft: Draft) -> None:
    """One tensor joins the scores of two sites, each time in another way."""
    for name in ("k", "v"):
        operands.repeat_heads(draft, name)
    draft.dims = ("b", "h", "q", "k")
    square = draft.sizes["q"] == draft.sizes["k"]
    if draft.maybe():
        term = draft.new("m", draft.pick(("q", "k"), ("b", 1, "q", "k"), ("h", "q", "k"), ("b", "h", "q", "k")))
        ways = [
            "s + {}",
            "s - {}",
            "torch.add(s, {}, alpha=0.5)",
            "(s + {}) * 2",
            "{} + s",
            "s + {}.mT" if square else "s - {}",
        ]
    else:
        term = draft.new("m", draft.pick(("q", "k"), ("b", 1, "q", "k")), "kept")
        ways = [
            "s.masked_fill(~{}, -1e4)",
            "s.masked_fill({}, -inf)",
            "torch.where({}, s, -inf)",
            "s.masked_fill(~{}, -inf)",
        ]
        ways += ["s.masked_fill(~{}.mT, -inf)" if square else "s + {}", "torch.where({}, -inf, s)"]
    for out in ("first", "o"):
        way = draft.pick(*ways).format(term)
        draft.add("s = q @ k.mT * 0.5", f"s = {way}", "# probe: s.amax(3)", "w = s.softmax(-1)", f"{out} = w @ v")
        draft.outputs.append(out)
        if draft.writes and draft.maybe():
            draft.add(draft.pick(f"{term}.copy_({term}.flip(-1))", "q = q + 1"))


def cross(draft: Draft) -> None:
    """More keys than queries, or fewer; k and v of other lengths and head dims than q."""
    draft.sizes["q"], draft.sizes["k"] = draft.pick((3, 7), (7, 3), (1, 6), (6, 1), (4, 5))
    draft.sizes["e"] = draft.pick(3, 8)
    operands.operands(draft, most=1)
    draft.pick(lambda d: _simple_site(d, scores.mask), calls.called)(draft)
    weights.after(draft, most=1)


def near_misses(draft: Draft) -> None:
    """One thing off: the softmax's axis, another reader of scores or weights, a product over another axis."""
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
    if draft.dims == ("b", "h", "q", "k") and draft.sizes["q"] == draft.sizes["k"] and draft.maybe():
        draft.add(
            draft.pick("o = w.mT @ v", "o = torch.einsum('bhqk,bhqd->bhkd', w, v)", "o = w.transpose(2, 3).matmul(v)")
        )
    else:
        weights.values(draft)
    weights.after(draft)


def boundaries(draft: Draft) -> None:
    """Sizes of 0 and 1, and next to powers of two."""
    for name in ("b", "q", "k", "d"):
        if draft.maybe():
            draft.sizes[name] = draft.pick(
                *((0, 1, 1) if name == "b" else (0, 1, 1, 15, 17, 33) if name != "d" else (1, 7, 9, 17))
            )
    draft.sizes["e"] = draft.pick(draft.sizes["d"], 1, 5)
    operands.operands(draft, most=1)
    draft.pick(
        lambda d: _simple_site(
            d, *(d.pick(scores.mask, scores.bias, scores.positional) for _ in range(d.number(0, 2)))
        ),
        calls.called,
    )(draft)
    weights.after(draft, most=1)


RULES: dict[str, Rule] = {
    "anything": anything,
    "views": views,
    "arrange": arrange,
    "contractions": contractions,
    "score steps": score_steps,
    "sinks": sinks,
    "roots": roots,
    "masks written": masks_written,
    "mask kinds": mask_kinds,
    "masks made": masks_made,
    "masks partly written": masks_partly_written,
    "mask tensors": mask_tensors,
    "several masks": several_masks,
    "integers": integers,
    "rounding": rounding,
    "fills": fills,
    "score kinds": score_kinds,
    "gradients": gradients,
    "strides": strides,
    "caller writes": caller_writes,
    "symbolic": symbolic,
    "checkpoints": checkpoints,
    "autocast": autocast,
    "halves": halves,
    "sdpa calls": sdpa_calls,
    "two sites": two_sites,
    "cross": cross,
    "near misses": near_misses,
    "boundaries": boundaries,
}


@st.composite
def programs(
    draw: Any,
    rule: str,
    lowerings: tuple[tuple[str, ...] | None, ...] = LOWERINGS,
    device: str = "cpu",
    large: bool = False,
    inner: str | None = None,
) -> Program:
    """One random program of a rule. large: sizes that a GPU's kernels take. inner: what compiles the rest, without it one of several."""
    kv = draw(st.sampled_from((1, 2)))
    lengths = (1, 3, 4, 6) if not large else (17, 32, 65, 128)
    sizes = {
        "b": draw(st.sampled_from((2, 1, 2, 3))),
        "kv": kv,
        "h": kv * draw(st.sampled_from((1, 1, 2, 3))),
        "q": draw(st.sampled_from(lengths[1:] + lengths)),
        "k": draw(st.sampled_from(lengths[1:] + lengths)),
        "d": draw(st.sampled_from((4, 1, 8) if not large else (16, 32, 64))),
    }
    if draw(st.booleans()):
        sizes["k"] = sizes["q"]
    sizes["e"] = draw(st.sampled_from((sizes["d"], sizes["d"], 5 if not large else 32)))
    draft = Draft(draw=draw, sizes=sizes, grads=draw(st.booleans()), writes=draw(st.integers(0, 2)) == 2)
    draft.dtype = draw(st.sampled_from(_DTYPES if device == "cpu" else _CUDA_DTYPES))
    if lowerings == (("triton",),) and draft.dtype == torch.float64:
        draft.dtype = torch.float32
    if rule == "fills" and draw(st.booleans()):
        draft.dtype = torch.float64 if device == "cpu" else torch.float32
    RULES[rule](draft)
    dynamic = rule == "symbolic" or draw(st.integers(0, 7)) == 7
    others: dict[str, int] = {}
    if rule == "symbolic" or (dynamic and draw(st.booleans())):
        others = dict(sizes)
        for name in draw(st.sampled_from((("b",), ("q", "k"), ("b", "q", "k"), ("k",)))):
            more = (5, 2, 7, 1, 0) if not large else (33, 64, 96, 1)
            others[name] = draw(st.sampled_from(more if name != "b" else (3, 2, 1, 0)))
        if sizes["q"] == sizes["k"] and draw(st.booleans()):
            others["k"] = others["q"]
    return Program(
        rule=rule,
        inputs=tuple(draft.inputs),
        lines=tuple(line for line in (*draft.lines, *draft.last) if line.strip()),
        outputs=tuple(dict.fromkeys(draft.outputs)),
        after=tuple(draft.after),
        dtype=draft.dtype,
        sizes=tuple(sizes.items()),
        others=tuple(others.items()),
        dynamic=dynamic,
        lowerings=draw(st.sampled_from(lowerings + lowerings[-1:] * 3 if rule in PROOFS else lowerings)),
        inner=inner or draw(st.sampled_from(("eager", "eager", "eager", "eager", "aot_eager"))),
        verify=draw(st.integers(1, 2 if rule in PROOFS else 16)) == 2,
        device=device,
    )
