"""From the softmax to what is returned: sinks, what happens to the weights, the product with v, and to the output."""

from __future__ import annotations

from tests.fuzz.grammar.draft import Draft


def softmax(draft: Draft, *, sink: bool | str | None = None, changes: int = 1) -> None:
    """`w` from `s`, in the dtype of v."""
    key = draft.at("k")
    at = key if draft.causal_allowed else draft.number(0, len(draft.dims) - 1)
    possible = draft.dims[-1] == "k" and "bh" not in draft.dims
    sink = possible and (draft.maybe(6) if sink is None else sink)
    if sink:
        at = key
        sink = "first" if _join_sink(draft) else "last"
    elif at == key:
        draft.add(f"# probe: s.amax({key}), s.amin({key})" if not sink else "")
    at = draft.pick(at, at - len(draft.dims))
    dtype = draft.pick("W", str(draft.widest)) if draft.maybe(4) else None
    forms = [f"w = s.softmax({at})", f"w = torch.softmax(s, {at})", f"w = F.softmax(s, dim={at})"]
    if draft.maybe(4):
        forms = [f"w = torch.special.softmax(s, {at})"]
    if draft.maybe(12):
        forms = [
            f"w = F.softmax(input=s, dim={at})",
            f"w = torch.softmax(input=s, dim={at})",
            f"w = s.softmax(dim={at})",
        ]
    if dtype is None and not sink and draft.maybe(6):
        forms = _written_out(draft, at)
    draft.add(draft.pick(*forms) if dtype is None else f"w = F.softmax(s, dim={at}, dtype={dtype})")
    if sink:
        draft.add(_dropped(draft, first=sink == "first"))
    if draft.writes and draft.maybe(4):
        draft.add(draft.pick("k.mul_(0.5)", "v.mul_(0.5)", "q[:, :, :1].mul_(0)", "v[:, :1].add_(1)", "v.data.add_(1)"))
    if draft.kept and draft.maybe(6):
        draft.add(draft.pick(*_masked_again(draft)))
    for _ in range(draft.number(0, changes)):
        _change(draft)
    draft.add("w = w.to(v.dtype)")


def _written_out(draft: Draft, at: int) -> list[str]:
    """Softmaxes that are no call of one."""
    e = draft.name("e")
    draft.add(f"{e} = (s - s.amax({at}, keepdim=True)).exp()")
    return [
        f"w = {e} / {e}.sum({at}, keepdim=True)",
        f"w = {e} / ({e}.sum({at}, keepdim=True) + 1e-9)",
        f"w = {e} * {e}.sum({at}, keepdim=True).reciprocal()",
        f"w = {e} / {e}.sum({at}).unsqueeze({at})",
        f"w = F.log_softmax(s, {at}).exp()",
        f"w = (s - s.logsumexp({at}, keepdim=True)).exp()",
    ]


def _dropped(draft: Draft, *, first: bool) -> str:
    """A line that takes the column of sinks away again, or now and then another one."""
    first = not first if draft.maybe(6) else first
    least, sizes = ("1", "[1, w.shape[-1] - 1]") if first else ("0", "[w.shape[-1] - 1, 1]")
    forms = ["w = w[..., 1:]"] if first else ["w = w[..., :-1]"] * 2
    forms += [
        f"w = w.narrow(-1, {least}, w.shape[-1] - 1)",
        f"w = w.split({sizes}, dim=-1)[{least}]",
        f"w = torch.split(w, {sizes}, {len(draft.dims) - 1})[{least}]",
    ]
    return str(draft.pick(*forms))


def _join_sink(draft: Draft) -> bool:
    """Whether it stands first."""
    if draft.maybe(5):
        first, number = draft.maybe(3), draft.pick("0.0", "1.5")
        draft.add(f"s = F.pad(s, {'(1, 0)' if first else '(0, 1)'}, value={number})")
        return bool(first)
    if draft.maybe(4):
        logits, own = "torch.zeros(s.shape[:-1], dtype=s.dtype, device=s.device)[..., None]", ""
    else:
        logits = draft.new("sink", (draft.sizes["h"],))
        shape = ", ".join("-1" if dim == "h" else "1" for dim in draft.dims)
        own = f"{logits}.view({shape})"
        logits = draft.pick(
            f"{own}.expand(*s.shape[:-1], 1).to(s.dtype)",
            f"({own} + torch.zeros_like(s[..., :1])).to(s.dtype)"
            if draft.maybe(6)
            else f"{own}.expand(*s.shape[:-1], -1).to(s.dtype)",
        )
    first = draft.maybe(4)
    parts = f"[{logits}, s]" if first else f"[s, {logits}]"
    draft.add(draft.pick(*[f"s = torch.cat({parts}, dim=-1)"] * 3, f"s = torch.cat({parts}, {len(draft.dims) - 1})"))
    if draft.maybe():
        draft.add(
            draft.pick(
                "s = s - s.amax(-1, keepdim=True)",
                "s = s - s.max(-1, keepdim=True).values",
                "s = s * 0.5",
                "s = s.clamp(min=-1e30)",
            )
        )
    return bool(first)


def with_a_sink(draft: Draft) -> None:
    """`o` by one more number in the denominator that is no column: a gate of the output or of the weights, a term beside the sum of the
    exponentials. Mostly it is that, and now and then one thing is off."""
    order = [draft.dims.index(axis) for axis in "bhqk"]
    draft.add("" if order == [0, 1, 2, 3] else f"s = s.permute{tuple(order)}")
    draft.dims = ("b", "h", "q", "k")
    draft.add("# probe: s.amax(3), s.amin(3)")
    sink = f"{draft.new('sink', (draft.sizes['h'],))}.view(1, -1, 1, 1)" if not draft.maybe(5) else "0.5"
    draft.add(f"sink = {sink}" if sink != "0.5" else "sink = torch.full((1, 1, 1, 1), 0.5, dtype=D, device=s.device)")
    if draft.maybe():
        # Exponentials, divided before or after the product with v.
        most = "s.amax(-1, keepdim=True)"
        most = draft.pick(most, f"{most}.detach()", f"torch.maximum({most}, sink)")
        term = draft.pick(*[" + (sink - a).exp()"] * 3, "", "", " + sink.exp()", " + 1")
        draft.add(f"a = {most}", "e = (s - a).exp()", f"z = e.sum(-1, keepdim=True){term}")
        v = "v" if draft.dtype == draft.widest else "v.to(e.dtype)"
        draft.add(
            draft.pick(
                f"o = (e @ {v}) / z",
                f"o = (e @ {v}) / z",
                f"o = torch.einsum('bhqk,bhkd->bhqd', e, {v}) * z.reciprocal()",
                f"o = (e @ {v}) * (1 / z)",
                f"o = (e / z) @ {v}",
                f"o = ((e @ {v}).transpose(1, 2) / z.transpose(1, 2)).transpose(1, 2)",
            ),
            "o = o.to(v.dtype)",
        )
        return
    draft.add(
        draft.pick(
            *["lse = s.logsumexp(-1, keepdim=True)"] * 3,
            "lse = torch.logsumexp(s, 3)[..., None]",
            "lse = s.exp().sum(-1, keepdim=True).log()",
            "lse = s.amax(-1, keepdim=True); lse = lse + (s - lse).exp().sum(-1, keepdim=True).log()",
            "lse = (s * 0.5).logsumexp(-1, keepdim=True)"
            if draft.maybe(4)
            else "lse = s.logsumexp(dim=(3,)).unsqueeze(3)",
        )
    )
    gates = [
        "torch.sigmoid(lse - sink)",
        "(lse - sink).sigmoid()",
        "1 / (1 + (sink - lse).exp())",
        "(1 - torch.sigmoid(sink - lse))",
        "(lse - torch.logaddexp(lse, sink)).exp()",
        "lse.exp() / (lse.exp() + sink.exp())",
        "torch.stack(torch.broadcast_tensors(lse, sink)).softmax(0)[0]",
        "F.logsigmoid(lse - sink).exp()",
        "(torch.tanh((lse - sink) / 2) + 1) / 2",
    ]
    if draft.maybe(6):
        gates = [
            "torch.sigmoid(sink - lse)",
            "torch.sigmoid(lse + sink)",
            "torch.sigmoid((lse - sink) * 0.5)",
            "(lse - sink)",
        ]
    gate = draft.pick(*gates)
    draft.add("w = s.softmax(-1).to(v.dtype)")
    forms = (
        f"o = (w @ v) * {gate}",
        f"o = w @ v; o = o * {gate}",
        f"o = {gate} * (w @ v)",
        f"g = {gate}; o = ((w @ v).transpose(1, 2) * g.transpose(1, 2)).transpose(1, 2)",
        f"w = w * {gate}; o = w.to(v.dtype) @ v",
        f"g = {gate}; o = w @ v; o = o - o * (1 - g)",
        f"g = {gate}.transpose(1, 2).expand(-1, -1, -1, v.shape[3]).flatten(2); o = (w @ v).transpose(1, 2).flatten(2) * g; "
        "o = o.unflatten(2, (v.shape[1], -1)).transpose(1, 2)",
        *([f"o = w @ v; o.mul_({gate})"] if draft.writes else []),
    )
    draft.add(draft.pick(*forms))


def _change(draft: Draft) -> None:
    seen = draft.name("seen")
    changes = [
        "w = w.contiguous()",
        "w = torch.dropout(w, 0.5, False)",
        "w = F.dropout(w, 0.0, training=True)",
        "w = w[..., :]",
        "w = w * 2",
        "w = w.detach()",
        f"{seen} = w.sum(-1)",
        f"{seen} = w * 1",
        "w = w.to(W)",
        f"{seen} = w.detach().mean()",
        "w = w.masked_fill(w < 0.01, 0.0)",
        "w = w.nan_to_num()",
        "w = w / w.sum(-1, keepdim=True)",
    ]
    draft.add(draft.pick(*changes))
    if draft.lines[-1].strip().startswith(seen):
        draft.outputs.append(seen)


def _masked_again(draft: Draft) -> list[str]:
    """Weights that a mask sets to zero: one that the scores had, or its opposite."""
    c = draft.pick(*draft.kept)
    forms = [
        f"w = w.masked_fill(~{c}, 0.0)",
        f"w = torch.where({c}, w, 0.0)",
        f"w = w.masked_fill({c}.logical_not(), 0)",
        f"w = w * {c}",
        f"w = {c}.to(w.dtype) * w",
    ]
    if draft.maybe(4):
        forms = [f"w = w.masked_fill({c}, 0.0)", f"w = w * ~{c}", f"w = w.mT.masked_fill(~{c}, 0.0).mT"]
    if draft.writes and draft.maybe(4):
        forms = [f"{line.replace('w = ', f'{c}.logical_not_(); w = ', 1)}" for line in forms]
    return forms


def values(draft: Draft) -> None:
    """`o` of (B, H, S, E)."""
    dims = draft.dims
    if dims[0] == "bh" and dims[1:] in (("q", "k"), ("k", "q")) and draft.maybe():
        w = "w" if dims[1:] == ("q", "k") else "w.mT"
        if draft.maybe(5):
            added = draft.new("x", ("b*h", "q", draft.pick("e", 1)))
            numbers = f"beta={draft.pick(0, 0.5, 1)}, alpha={draft.pick(2, 1)}"
            draft.add(f"o = torch.baddbmm({added}, {w}, v.flatten(0, 1), {numbers})")
        else:
            draft.add(f"o = torch.bmm({w}, v.flatten(0, 1))")
        draft.add(f"o = o.unflatten(0, (v.shape[0], {draft.sizes['h']}))")
        return
    if "bh" in dims:
        at = dims.index("bh")
        draft.add(f"w = w.unflatten({at}, (v.shape[0], {draft.sizes['h']}))")
        dims = (*dims[:at], "b", "h", *dims[at + 1 :])
    form = draft.pick(
        "einsum", "einsum other", "permute", "permute", "swapped", *(["summed"] if "w" not in dims else [])
    )
    if form == "summed" and draft.maybe():
        # A label of one operand alone is summed by itself.
        of_v = draft.pick(
            ("xhkd", "v"),
            ("bxkd", "v"),
            ("bhkdx", "v[..., None].expand(-1, -1, -1, -1, 2)"),
            ("xbhkd", "torch.stack([v, v])"),
        )
        draft.add(f"o = torch.einsum('{''.join(dims)},{of_v[0]}->bhqd', w, {of_v[1]})")
    elif form in ("einsum", "summed"):
        draft.add(f"o = torch.einsum('{''.join(dims)},bhkd->bhqd', w, v)")
    elif form == "einsum other":
        draft.add(f"o = torch.einsum('bhkd,{''.join(dims)}->bqhd', v, w).transpose(1, 2)")
    elif form == "swapped":
        draft.add(f"o = (v.mT @ w.permute{tuple(dims.index(axis) for axis in 'bhkq')}).mT")
    elif dims == ("b", "h", "q", "k"):
        draft.add("o = w @ v")
    else:
        draft.add(f"o = w.permute{tuple(dims.index(axis) for axis in 'bhqk')} @ v")


def _written(draft: Draft) -> None:
    """The output or what was made of it is written, and only sums are returned: who shares memory with whom shows, and no strides."""
    made = draft.pick(
        "o.contiguous()",
        "o.transpose(1, 2).contiguous()",
        "o.transpose(1, 2).flatten(2)",
        "o.reshape(-1)",
        "o.flatten(1, 2)",
        "o.permute(2, 0, 1, 3).reshape(o.shape[2], -1)",
        "o.transpose(1, 2)",
    )
    write = draft.pick("{}.mul_(2)", "{}.add_(1)", "{}[:1] = 0", "{}.data.mul_(2)").format(draft.pick("y", "y", "o"))
    draft.add(f"y = {made}", write, "total = o.sum()", f"part = y{draft.pick('.sum()', '.exp().sum()')}")
    draft.outputs += ["total", "part"]


def after(draft: Draft, *, least: int = 0, most: int = 2) -> None:
    """What happens to the output."""
    if draft.writes and draft.maybe(4):
        _written(draft)
        return
    outputs = len(draft.outputs)
    for _ in range(draft.number(least, most)):
        changes = [
            "o = o.contiguous()",
            "o = o * 2",
            "o = o.transpose(1, 2).contiguous().transpose(1, 2)",
            "o = o.transpose(1, 2).reshape(o.shape[0], o.shape[2], -1).unflatten(-1, (o.shape[1], -1)).transpose(1, 2)",
            "{seen} = o.transpose(1, 2).flatten(2)",
            "{seen} = o.detach().sum()",
            "{seen} = o.stride(0) * torch.ones(1, device=o.device)",
            "{seen} = o.transpose(1, 2).reshape(-1).view(-1)[:1]",
        ]
        if draft.writes:
            changes += [
                "r = o.transpose(1, 2).flatten(2); r += 1; {seen} = r.exp()",
                "{seen} = o.transpose(1, 2).flatten(2); {seen}.mul_(2)",
                "{seen} = o.transpose(1, 2).contiguous(); {seen}.add_(1)",
                "r = o.contiguous(); r.mul_(2); {seen} = r.sum()",
                "o += 1",
                "o.mul_(2)",
                "o[:, :, :1] = 0",
                "o.data.mul_(2)",
                "r = o.detach(); r.mul_(2); {seen} = o * 1",
                "r = o.reshape(-1); r.add_(1); {seen} = o * 1",
            ]
        seen = draft.name("seen")
        line = draft.pick(*changes)
        draft.add(line.format(seen=seen))
        if "{seen}" in line:
            draft.outputs.append(seen)
    if len(draft.outputs) > outputs and draft.maybe(3):
        # Only what was made of the output is returned: its strides are nobody's business then.
        draft.add("total = o.sum()")
        draft.outputs.append("total")
    else:
        draft.outputs.append("o")
