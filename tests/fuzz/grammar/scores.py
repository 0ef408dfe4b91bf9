"""The product q kᵀ and the steps on the scores up to the softmax, other than masks."""

from __future__ import annotations

from tests.fuzz.grammar import conditions, made_masks, masks
from tests.fuzz.grammar.draft import Draft


def product(draft: Draft, *forms: str) -> None:
    """Scores from `q` and `k` of (B, H, S, D)."""
    form = draft.pick(
        *(forms or ("matmul", "matmul", "swapped", "turned", "einsum", "einsum", "bmm", "baddbmm", "dots"))
    )
    if form == "summed":
        _summed(draft)
        draft.dims = ("b", "h", "q", "k")
    elif form == "matmul":
        draft.add(
            f"s = {draft.pick('q @ k.mT', 'torch.matmul(q, k.transpose(-1, -2))', 'q.matmul(k.permute(0, 1, 3, 2))')}"
        )
        draft.dims = ("b", "h", "q", "k")
    elif form == "upcast":
        draft.add(draft.pick("s = q.to(W) @ k.to(W).mT", "s = torch.matmul(q.to(W), k.transpose(-1, -2).to(W)) * 0.5"))
        draft.dims = ("b", "h", "q", "k")
    elif form == "turned":
        draft.add(draft.pick("s = (k @ q.mT).mT", "s = (k @ q.transpose(2, 3)).mT.contiguous()"))
        draft.dims = ("b", "h", "q", "k")
    elif form == "swapped":
        draft.add("s = k @ q.mT")
        draft.dims = ("b", "h", "k", "q")
    elif form == "einsum":
        out = "".join(draft.draw(_ORDERS))
        draft.add(
            f"s = torch.einsum('bhqd,bhkd->{out}', q, k)"
            if draft.maybe()
            else f"s = torch.einsum('xynd,xymd -> {out.translate(_OTHER)}', q, k)"
        )
        draft.dims = tuple(out)
    elif form == "dots":
        draft.add(
            draft.pick(
                "s = torch.einsum('...id,...jd->...ij', q, k)", "s = torch.einsum('b...qd,b...kd->b...qk', q, k)"
            )
        )
        draft.dims = ("b", "h", "q", "k")
    else:
        draft.dims = ("bh", "q", "k")
        q, k = "q.flatten(0, 1)", "k.flatten(0, 1).mT"
        if form == "bmm":
            draft.add(f"s = torch.bmm({q}, {k})")
        else:
            bias = made_masks.term(draft, "normal", keep_rank=True)
            draft.add(f"s = torch.baddbmm({bias}, {q}, {k}, beta={draft.pick(1, 0, 0.5)}, alpha={draft.pick(1, 0.5)})")


def _summed(draft: Draft) -> None:
    """Scores by a product in which a label of one operand alone is summed by itself."""
    labels = {"q": "bhqd", "k": "bhkd"}
    name = draft.pick("q", "k")
    own = labels[name]
    if draft.maybe(4):
        # One that the other operand has, too, or the head dim, which it has under another letter then.
        old, new = draft.pick(("b", "x"), ("d", "c"), ("h", "x"))
        given, labels[name] = name, own.replace(old, new)
    else:
        at, times = draft.pick(0, 1, 3, 4), draft.pick(2, 3, 1)
        labels[name] = own[:at] + "x" + own[at:]
        given = draft.pick(
            f"{name}.unsqueeze({at}).expand({', '.join(['-1'] * at + [str(times)] + ['-1'] * (4 - at))})",
            f"{name}.unsqueeze({at})",
            f"torch.stack([{name}] * {times}, {at})",
        )
    terms, x = (labels["q"], labels["k"]), {"q": "q", "k": "k", name: given}
    if draft.maybe(3):
        draft.add(f"s = torch.einsum('{terms[1]},{terms[0]}->bhqk', {x['k']}, {x['q']})")
    else:
        draft.add(f"s = torch.einsum('{terms[0]},{terms[1]}->bhqk', {x['q']}, {x['k']})")


def _orders() -> object:
    from hypothesis import strategies as st

    return st.permutations("bhqk")


_ORDERS = _orders()
_OTHER = str.maketrans("bhqk", "xynm")


def scale(draft: Draft) -> None:
    forms = [
        "s = s * 0.5",
        "s = s / 1.5",
        "s = 0.7 * s",
        "s = s * torch.tensor(0.5)",
        "s = s * torch.full((1, 1, 1), 0.5, device=s.device)",
        "s = s * -0.5",
        "s = s / (k.shape[-1] ** 0.5)",
        "s = s * k.shape[-1] ** -0.5",
        "t = torch.ones(()); t.fill_(0.5); s = s * t",
        "t = torch.ones(1, device=s.device); t[0] = 0.5; s = s * t",
    ]
    if draft.maybe(3):
        given = draft.new("t", (), "positive")
        forms = [f"s = s * {given}", f"s = s / {given}", f"s = {given} * s"]
        if draft.writes and draft.maybe(3):
            forms = [f"{line}; {given}.data.mul_(2)" for line in forms]
    elif draft.maybe(3) and "bh" not in draft.dims:
        axes = draft.pick("h", "h", "q", "bh", "hq", "k", "")
        given = draft.new("t", tuple(axis for axis in draft.dims if axis in axes) or (1,), "positive")
        sizes = (f"s.shape[{i}]" if dim in axes else "1" for i, dim in enumerate(draft.dims))
        own = f"{given}.view({', '.join(sizes)})"
        own = own if axes else given
        forms = [
            f"s = s * {own}",
            f"s = {own}.to(s.dtype) * s",
            f"s = s / {own}",
            f"s = s * {own}.clamp(max=4.0).exp()",
        ]
        if draft.writes and draft.maybe():
            forms = [
                f"{line}; {given}{write}"
                for line in forms
                for write in (".data.mul_(3)", ".data.add_(1)", ".data.zero_()")
            ]
    elif draft.writes and draft.maybe(3):
        forms = ["s.mul_(0.5)", "s = s.div_(2)", "s *= 0.5", "s /= 2"]
    draft.add(draft.pick(*forms))


def bias(draft: Draft) -> None:
    """A tensor that is added."""
    kind = draft.pick("normal", "normal", "large", "kept")
    term = made_masks.term(draft, kind)
    forms = ["s = s + {}", "s = {} + s", "s = torch.add(s, {}, alpha=0.5)", "s = s + 0.5 * {}", "s = s + {}.detach()"]
    if kind == "kept":
        forms = forms[:2]
    else:
        forms += [
            "s = s - {}",
            "s = {} - s",
            "s = torch.rsub(s, {})",
            "s = -s + {}",
            "s = torch.sub(s, {}, alpha=2)",
            "s = (s + {}) * 0.5",
            "s = (s + {}) / 1.5",
            "s = 2.0 * ({} + s)",
            *(["s += {}", "s.add_({}, alpha=0.5)"] if draft.writes else []),
        ]
    # Now and then of another dtype than the scores, and scaled together with them.
    is_narrow = kind != "kept" and draft.maybe(3)
    narrow = f"{term}.to({draft.pick('torch.bfloat16', 'torch.bfloat16', 'torch.float16')})"
    draft.add(draft.pick(*forms).format(narrow if is_narrow else term))
    if is_narrow and not draft.maybe(4):
        draft.add(draft.pick("s = s * 0.7", "s = s / 1.5", "s = s * -3.0", "s = s * 0.3 * 1.7"))
    if draft.writes and kind != "kept" and draft.maybe(4):
        draft.add(f"{term}.data.{draft.pick('zero_()', 'add_(1)', 'mul_(2)')}")


def slopes(draft: Draft) -> None:
    """A slope of each head, times a distance."""
    positional(draft, "slopes")


def positional(draft: Draft, *kinds: str) -> None:
    """What is added for a pair of positions: slopes, tables of distances, buckets, penalties."""
    conditions.positions(draft)
    heads = draft.sizes["h"]
    kind = (
        draft.pick(*kinds)
        if kinds
        else draft.pick(
            "row",
            "slopes",
            "slopes",
            "slopes",
            "table",
            "table",
            "buckets",
            "penalty",
            "number",
            "gathered",
            "padding",
            "row",
            "row",
        )
    )
    if kind == "row":
        text = _of_a_row(draft)
    elif kind == "slopes":
        given = draft.new("slope", (heads,), "normal", grad=draft.grads and draft.maybe(3))
        slope = draft.pick(
            f"{given}[None, :, None, None]",
            f"{given}.view(1, -1, 1, 1)",
            f"(2.0 ** -torch.arange(1, {heads + 1}, device=q.device))[:, None, None]",
        )
        position = draft.pick(
            *(
                "(j - i)",
                "(j - i)",
                "j",
                "-(i - j).abs()",
                "(j - i).clamp(max=0)",
                "(j - m + 1)",
                "(i - j).abs().neg()",
            ),
            *("(2 * j)", "(2 * (j - i))", "(i - j)", "(3 * j - i)", "(j * 2 - i)", "(i - 2 * j)"),
        )
        text = draft.pick(
            f"{slope} * {position}",
            f"({position}).to(D) * {slope}",
            f"{slope} * ({position}).float().to(D)",
            f"{slope} * ({position}).float().to(D) / 2",
        )
    elif kind == "table":
        rows = draft.number(2, 5)
        given = draft.new("table", (draft.pick(rows, rows + 3), heads))
        rows = int(draft.inputs[-1].shape[0])
        index = draft.pick(
            f"(j - i).clamp({-(rows // 2)}, {(rows - 1) // 2}) + {rows // 2}",
            f"(i - j).abs().clamp(max={rows - 1})",
            f"(i - j).clamp(0, {rows - 1})",
            f"(j - i) % {rows}",
        )
        text = draft.pick(
            f"{given}[{index}].permute(2, 0, 1)",
            f"F.embedding({index}, {given}).permute(2, 0, 1)[None]",
            f"{given}.t()[:, {index}]",
            f"{given}[({index}).view(-1)].view(n, m, -1).permute(2, 0, 1).contiguous().unsqueeze(0)",
        )
    elif kind == "buckets":
        given = draft.new("table", (8, heads))
        both = draft.maybe()
        draft.add("far = (j - i).abs()" if both else "far = -torch.minimum(j - i, torch.zeros_like(j - i))")
        count = 4 if both else 8
        exact = count // 2
        span = draft.pick("1.3862943611198906", "2.0")
        draft.add(f"wide = (torch.log(far.float() / {exact}) / {span} * {count - exact}).to(torch.int64) + {exact}")
        draft.add(f"wide = torch.min(wide, torch.full_like(wide, {count - 1}))")
        draft.add(
            f"row = torch.where(far < {exact}, far, wide)" + (f" + (j > i).to(torch.int64) * {count}" if both else "")
        )
        text = draft.pick(
            f"{given}[row].permute(2, 0, 1)", f"F.embedding(row, {given}).permute([2, 0, 1]).unsqueeze(0)"
        )
    elif kind == "gathered":
        given = draft.new("table", (5, heads))
        text = f"{given}[(i * 2 + j) % 5].permute(2, 0, 1)"
    elif kind == "padding":
        given = draft.new("pad", ("b", "k"), "padding")
        text = f"(1.0 - {given}[:, None, None, :].to(D)) * {draft.pick('-1e4', '-3.0', '-1e9', '-100.0')}"
    elif kind == "penalty":
        text = f"torch.where({conditions.condition(draft, 1)}, {draft.pick('-2.0', '1.5', '0.0')}, {draft.pick('0.0', '-1.0', '3.0')})"
    else:
        text = f"({conditions.whole(draft, 1)}).to(D) * {draft.pick('0.5', '-0.25', '1')}"
    p = draft.name("p")
    draft.add(f"{p} = ({text}).to(D)")
    draft.add(f"{p} = {masks.placed(draft, p)}")
    draft.add(draft.pick(f"s = s + {p}", f"s = {p} + s", f"s = s - {p}", f"s = torch.add(s, {p}, alpha=2)"))
    if kind == "slopes" and draft.maybe():
        # Slopes are added once more, the same ones or others.
        again = draft.new("slope", (heads,), "normal")
        other = masks.placed(draft, f"({again}[:, None, None] * {position}).to(D)")
        draft.add(draft.pick(f"s = s + {p}", f"s = s + {other}", f"s = s + {other}"))


#: ops that say nothing of an element by itself
_UNREAD = (".sort(-1).values", ".argsort(-1)", ".cummax(-1).values")


def _of_a_row(draft: Draft) -> str:
    """Numbers for each key by what a tensor holds for it, or for what was made of that by an op that nobody reads."""
    given = draft.new("ids", ("b", "k"), draft.pick("ids", "padding"))
    if draft.maybe():
        # Of what the same op was used for twice, the names differ in a number alone.
        op = draft.pick(*_UNREAD)
        again = draft.pick("", op, f".flip(-1){op}")
        draft.add(f"row = {given} {draft.pick('+ 1', '* 2', '% 2')}", f"row = row{op}{again}")
    else:
        draft.add(f"row = {given}" + draft.pick("", "", ".flip(-1)", *_UNREAD))
    draft.add("row = row[:, None, None, :]" if draft.maybe() else "row = row.view(-1, 1, 1, row.shape[-1])")
    low, high = draft.pick("-2.0", "1.5", "0.0"), draft.pick("0.5", "-1.0", "3.0")
    return str(
        draft.pick(
            f"torch.where(row == 0, {low}, {high})",
            f"torch.where(row == 1, {low}, row * {high})",
            f"torch.where(row == 1, row.to(D), row.to(D) * {high} + 1)",
            f"torch.where(row == 0, {low}, (1 - row) * {high})",
            f"torch.where(row == 0, {low}, row.to(D) + 1)",
            f"(row + 1).masked_fill(row == 1, 0) * {high}",
            f"torch.where(row != 0, row * {high}, {low})",
            f"torch.where(row >= 0, {low}, {high}) * row",
        )
    )


def mask(draft: Draft) -> None:
    """A mask, of any sort that the softmax's axis allows."""
    if draft.causal_allowed and not draft.maybe(4):
        masks.apply(draft, masks.any_condition(draft))
    else:
        masks.apply(draft, made_masks.term(draft, "kept"))


def usual_mask(draft: Draft) -> None:
    """A mask that models write, causal mostly."""
    conditions.positions(draft)
    text = draft.pick("(i >= j)", "(j <= i)", "~(j > i)", "(i + 1 > j)", *conditions.USUAL)
    masks.apply(draft, masks.placed(draft, text), draft.pick("-inf", "-inf", "torch.finfo(s.dtype).min", "-1e9"))


def cap(draft: Draft) -> None:
    number = draft.pick("5", "2.0", "1.5")
    forms = [
        f"s = {number} * (s / {number}).tanh()",
        "s = (s * 0.2).tanh() * 4.0",
        "s = s.tanh()",
        f"s = torch.tanh(s / {number}); s = s * {number}",
    ]
    draft.add(draft.pick(*forms))


def shift(draft: Draft) -> None:
    key = draft.at("k")
    # Where a whole row or column is -inf, minus its maximum is NaN, which no two kernels treat alike.
    at = key if any("-inf" in line for line in draft.lines) else draft.pick(key, -1, -1, -2)
    form = draft.pick(
        "s.amax({}, keepdim=True)",
        "s.max({}, keepdim=True)[0]",
        "s.amax({}, keepdim=True).detach()",
        "s.max({}, keepdim=True).values",
        "s.amax({}, keepdim=True) * 0.5",
    )
    # Behind it a row whose keys are all shut out has scores like any other.
    draft.add(f"# probe: s.amax({key}), s.amin({key})")
    line = f"s = s - {form.format(at)}"
    draft.add(line if not draft.maybe(6) else f"s = torch.sub(s, {form.format(at)}, alpha=2)")


def turn(draft: Draft) -> None:
    """Other dimensions, or the same ones in another tensor."""
    if draft.maybe(3):
        draft.add(
            draft.pick(
                "s = s.contiguous()",
                "s = s.unsqueeze(0).squeeze(0)",
                "s = s.clone()",
                "s = s.to(W)",
                "s = s.to(W).to(D)",
                "s = s.to(torch.float64)",
            )
        )
        return
    if draft.dims[0] == "bh" and draft.maybe():
        draft.add(
            f"s = s.{draft.pick('unflatten(0, (-1, {}))', 'view(-1, {}, *s.shape[1:])')}".format(draft.sizes["h"])
        )
        draft.dims = ("b", "h", *draft.dims[1:])
    elif draft.dims[:2] == ("b", "h") and draft.maybe():
        draft.add(f"s = s.{draft.pick('flatten(0, 1)', 'reshape(-1, *s.shape[2:])')}")
        draft.dims = ("bh", *draft.dims[2:])
    else:
        order = draft.draw(_permutations(len(draft.dims)))
        draft.add(f"s = s.permute{tuple(order)}")
        draft.dims = tuple(draft.dims[i] for i in order)


def _permutations(n: int) -> object:
    from hypothesis import strategies as st

    return st.permutations(range(n))


def look(draft: Draft) -> None:
    """Somebody else reads the scores, or writes to a part of them."""
    name = draft.name("seen")
    if draft.writes and draft.maybe():
        draft.add(
            draft.pick(
                "s.view(-1)[0] = 0" if draft.maybe(9) else "s.select(0, 0).mul_(0.5)",
                f"{name} = s[..., 0]",
                "s[:1].add_(0.5)",
            )
        )
    else:
        draft.add(
            draft.pick(
                f"{name} = s.sum()",
                f"{name} = s.detach().amax()",
                f"{name} = torch.zeros_like(s)",
                f"{name} = s.detach() * 1",
            )
        )
    if draft.lines[-1].strip().startswith(name):
        draft.outputs.append(name)


def clamp(draft: Draft) -> None:
    low = draft.pick("-1e30", "torch.finfo(s.dtype).min", "-65504.0", "-2.0", "-1e5", "-5.0")
    high = draft.pick("None", "None", "1e30", "65504.0", "2.0", "1e5")
    draft.add(
        draft.pick(
            f"s = s.clamp(min={low}, max={high})",
            f"s = torch.maximum(s, torch.full([], {low}).to(s))",
            f"s = s.clamp({low})",
            f"s = torch.clamp_min(s, {low})",
        )
    )


def stop(draft: Draft) -> None:
    draft.add(
        draft.pick("with torch.no_grad(): s = s * 1.5", "s = s.detach()", "with torch.no_grad(): s = s.contiguous()")
    )


def enlarge(draft: Draft) -> None:
    """Scores far beyond what a kernel may expect."""
    draft.add(draft.pick("s = s * 1e4", "s = s * 1e6", "s = s * 300.0", "s = s * 3e5"))


def lifted(draft: Draft) -> None:
    """A finite fill, and something later that lifts some of what was filled."""
    conditions.positions(draft)
    size = draft.pick("1e9", "1e5", "65504.0", "70000.0", "1e6", "1e4", "30000.0")
    shut, lift = conditions.with_a_key(draft, conditions.condition(draft, 1)), conditions.condition(draft, 1)
    c, up_at = draft.name("c"), draft.name("l")
    draft.add(f"{c} = {masks.placed(draft, shut)}")
    draft.add(f"{up_at} = {masks.placed(draft, lift)}")
    up = draft.pick(size, size, f"{size} / 2", "3.0", f"2 * {size}")
    both = f"(torch.where({c}, 0.0, -{size}) + torch.where({up_at}, {up}, 0.0)).to(s.dtype)"
    forms = [
        (f"s = s.masked_fill(~{c}, -{size})", f"s = s + torch.where({up_at}, {up}, 0.0).to(s.dtype)"),
        (f"s = s + torch.where({c}, 0.0, -{size}).to(s.dtype)", f"s = s + torch.where({up_at}, {up}, 0.0).to(s.dtype)"),
        (f"s = s + {both}",),
        (f"s = {both} + s",),
        (f"t = {both}", "s = s + t"),
        (f"s = s + torch.where({up_at}, {up}, 0.0).to(s.dtype)", f"s = s + torch.where({c}, 0.0, -{size}).to(s.dtype)"),
        (f"s = s - torch.where({c}, 0.0, -{size}).to(s.dtype)",),
        (f"s = s.masked_fill(~{c}, -{size})", f"s = s.masked_fill({up_at}, -{size} / 2)"),
        (f"s = s.masked_fill(~{c}, -{size})", "s = s * -1.0"),
        (f"s = s.masked_fill(~{c}, -{size})", "s = s * 1e-4"),
        (f"s = s.masked_fill(~{c}, -{size})", f"s = s.clamp(min=-{size} / 4)"),
        (f"s = torch.where({c}, s, -{size})", f"s = s - torch.where({up_at}, -{up}, 0.0).to(s.dtype)"),
        (f"s = s + torch.where({c}, 0.0, -{size}).to(s.dtype) * {draft.pick('0.5', '2.0', '-1.0', '1e-3')}",),
    ]
    if draft.maybe(3):
        given = made_masks.term(draft, "normal")
        forms = [
            (f"s = s.masked_fill(~{c}, -{size})", f"s = s + {given} * {size}"),
            (f"s = s.masked_fill(~{c}, -{size})", f"s = s + {given}"),
        ]
    draft.add(*draft.pick(*forms))


COMMON = (scale, bias, mask, mask, cap, turn, positional)
RARE = (shift, look, clamp, stop)


def steps(draft: Draft, least: int = 0, most: int = 4) -> None:
    for _ in range(draft.number(least, most)):
        draft.pick(*COMMON, *COMMON, *(RARE if draft.grads else RARE[:3]))(draft)
