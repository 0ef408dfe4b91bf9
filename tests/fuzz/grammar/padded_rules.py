"""Padded batches: models of ops around attentions, compiled with `unpad`, of whose outputs only what stands at real tokens is read.

Shared prompts: such models of rows that begin alike, compiled with `share_prefix`; all outputs are read.
"""

from __future__ import annotations

import dataclasses

from tests.fuzz.grammar.draft import Draft

#: of each token by itself; x: (rows, positions, features), real: 1 where a token is real
_ALONE = (
    "x = x * 0.5 + 1",
    "x = F.gelu(x)",
    "x = x * x.tanh()",
    "x = F.layer_norm(x, x.shape[-1:])",
    "x = F.layer_norm(x, x.shape[-1:], weight=w)",
    "x = x.softmax(-1)",
    "x = x * w",
    "x = x + p",
    "x = x + r[:, None]",
    "x = x * r[:, None] + p",
    "x = x @ m",
    "x = F.linear(x, m, w)",
    "x = torch.addmm(w, x.reshape(-1, x.shape[-1]), m).view(x.shape)",
    "x = (x.flatten(0, 1) @ m).view(x.shape)",
    "x = x * real[..., None]",
    "x = x.masked_fill(real[..., None] == 0, 0.0)",
    "x = torch.where(real[..., None] == 0, 1.0, x)",
    "x = x.transpose(1, 2).sin().transpose(1, 2)",
    "x = x.transpose(0, 1).cos().transpose(0, 1)",
    "x = (x.transpose(0, 1) * p[:, None] + r).transpose(0, 1)",
    "x = (x.transpose(1, 2) * p.mT).transpose(1, 2)",
    "x = torch.cat((x[..., :1], x[..., 1:] * 2), -1)",
    "x = torch.cat((x, x + p.expand(x.shape)), -1)[..., :: 2]",
    "x = torch.stack((x, x * 2), 2).sum(2)",
    "x = x.unflatten(-1, (2, -1)).sin().flatten(2)",
    "x = F.glu(torch.cat((x, x), -1))",
    "a, c = x.chunk(2, -1); x = torch.cat((c, a), -1)",
    "x = x + x.mean(-1, keepdim=True)",
    "x = x + x.norm(dim=-1, keepdim=True)",
    "x = x * torch.arange(n, device=x.device)[:, None].to(x.dtype) * 0.1",
    "x = x + torch.arange(x.shape[0], device=x.device)[:, None, None] * 0.1",
    "x = x + F.embedding(torch.arange(n, device=x.device), p)",
    "x = x + F.embedding((real.cumsum(1) - 1).clamp(min=0), p)",
    "x = x.clone().mul_(2)",
    "x = x.to(torch.float64).sin().to(D)",
    "x = x + (x * real[..., None]).sum(1, keepdim=True)",
    "x = x + ((x * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1))[:, None]",
    "x = x + x[:, :1]",
    "x = x + x[:, 0][:, None]",
    "x = x * 1; kept = x.detach()",
)
#: what brings tokens together, or counts them: padding has to stay in
_TOGETHER = (
    "x = x + x.mean(1, keepdim=True)",
    "x = x + x.cumsum(1)",
    "x = x.flip(1)",
    "x = x.flip(0)",
    "x = x + x.roll(1, 1)",
    "x = x * x.softmax(1)",
    "x = x * x.softmax(0)",
    "x = x + x.amax(1, keepdim=True)",
    "x = x - x.mean()",
    "x = x / (1 + x.abs().sum())",
    "x = x.sort(1).values",
    "x = F.layer_norm(x.transpose(1, 2), (n,)).transpose(1, 2)",
    "x = F.layer_norm(x, x.shape[1:])",
    "x = torch.cat((x[:, 1:], x[:, :1]), 1)",
    "x = x + F.pad(x[:, 1:], (0, 0, 0, 1))",
    "x = x + x.mean(0, keepdim=True)",
    "x = x + x @ x.mT @ x * 0.1",
    "x = x.reshape(x.shape[0], x.shape[2], n).transpose(1, 2)",
    "x = x.transpose(0, 1).reshape(x.shape)",
    "x = x * x.std(1, keepdim=True)",
    "x = x + F.embedding((x[..., 0] > 0).long(), p, scale_grad_by_freq=True)",
    "x = x + (x.cos() * real[..., None] + 1).sum(1, keepdim=True)",
    "x = x + (x * real[..., None]).amax(1, keepdim=True)",
    "x = x + (x * (1 - real)[..., None]).sum(1, keepdim=True)",
    "x = x + x.sum(1, keepdim=True)",
    "x = x * 1; x[:, 1:] += 1",
)
#: what is given back; each beside how the caller reads it
_ENDINGS = {
    "x": "{}.masked_fill((real == 0)[..., None], 0)",
    "x * 2": "{}.masked_fill((real == 0)[..., None], 0)",
    "x.transpose(1, 2)": "{}.masked_fill((real == 0)[:, None], 0)",
    "x.transpose(0, 1)": "{}.masked_fill((real == 0).mT[..., None], 0)",
    "x.flatten(0, 1)": "{}.masked_fill((real == 0).flatten()[:, None], 0)",
    "x.unflatten(-1, (2, -1)).permute(2, 0, 1, 3)": "{}.masked_fill((real == 0)[..., None], 0)",
    "x.sum(-1)": "{}.masked_fill(real == 0, 0)",
    "x.argmax(-1)": "{}.masked_fill(real == 0, 0)",
    "x[..., :3]": "{}.masked_fill((real == 0)[..., None], 0)",
    "x[:, 0]": "{}",
    "x[:, 0].tanh() @ m": "{}",
    "x[:, -1]": "{}",
    "x.transpose(0, 1)[-1]": "{}",
    "x[:, 1]": "{}",
    "x[0]": "{}.masked_fill((real[0] == 0)[:, None], 0)",
    "(x * real[..., None]).sum(1)": "{}",
    "(x * real[..., None]).sum(0)": "{}",
    "(x * real[..., None]).sum()": "{}",
    "(x * real[..., None]).sum((0, 1))": "{}",
    "(x * real[..., None]).sum(1) / real.sum(1, keepdim=True)": "{}",
    "(x.transpose(1, 2) * real[:, None]).sum(2)": "{}",
    "(x * real[..., None] * 2).sum(1)": "{}",
    "(x * real[..., None] + 1).sum(1)": "{}",
    "(x * real[..., None]).cos().sum(1)": "{}",
    "(x * real[..., None]).amax(1)": "{}",
    "(x * real[..., None]).mean(1)": "{}",
    "x.mean(1)": "{}",
    "x.sum()": "{}",
    "F.cross_entropy(x.flatten(0, 1), y.flatten())": "{}",
    "F.cross_entropy(x.view(-1, x.shape[-1]), y.view(-1), reduction='sum')": "{}",
    "F.cross_entropy(x.transpose(0, 1).flatten(0, 1), y.mT.flatten())": "{}",
    "F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=w.detach().abs())": "{}",
    "F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1)": "{}",
    "F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten())": "{}",
    "F.cross_entropy(x.flatten(0, 1), F.pad(y, (0, 1), value=-100)[:, 1:].flatten())": "{}",
    "(F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction='none') * real.flatten()).sum()": "{}",
}
_LOSS = "F.cross_entropy(x.flatten(0, 1), y.flatten())"
_PLAIN_ENDINGS = ("x", "x[:, 0]", "(x * real[..., None]).sum(1)", "x.transpose(0, 1)", _LOSS)


def padded_batches(draft: Draft) -> None:
    """Of tokens that are padding nothing is computed; what is read is what the model gives with them."""
    draft.unpad = True
    sizes = draft.sizes
    heads = draft.pick(2, 2, 1)
    length = max(sizes["q"], draft.pick(3, 4, 5, 8))
    sizes.update(b=max(sizes["b"], draft.pick(2, 3)), kv=heads, h=heads, q=length, k=length, d=draft.pick(4, 8), fill=0)
    if length > 16:
        # Of a GPU: its kernels take no smaller ones.
        sizes["d"] = 16
    sizes["e"] = sizes["d"]
    if draft.maybe(3):
        # Other tokens of the same batch are real in the second call.
        draft.others = {**sizes, "fill": draft.number(1, 5)}
    real = _tokens(draft)
    wide = "h*d"
    draft.add(f"x = {_embedded(draft, wide)}", f"n, real = x.shape[1], {real}")
    for name, shape in (("w", (wide,)), ("p", ("q", wide)), ("r", ("b", wide)), ("m", (wide, wide))):
        draft.add(f"{name} = {draft.new(name, shape, 'normal' if name != 'm' else 'small')}")
    given = next(i.name for i in draft.inputs if i.kind in ("padding", "filled"))
    draft.add(f"allowed = {_allowed(draft, given)}")
    for number in range(draft.number(1, 2)):
        if number and draft.maybe():
            # Another band, or other tokens: those are no padding of the graph.
            other = draft.new("pad", ("b", "q"), "filled", grad=False) if draft.maybe() else given
            draft.add(f"allowed = {_allowed(draft, other)}")
        _steps(draft)
        _attention(draft, wide)
    _steps(draft)
    endings = draft.pick(1, 1, 2)
    for _ in range(endings):
        ending = draft.pick(*_PLAIN_ENDINGS * 6, *_ENDINGS)
        if "y." in ending or "y[" in ending or "(y" in ending:
            _labels(draft)
        out = draft.name("o")
        draft.add(f"{out} = {ending}")
        draft.outputs.append(out)
        draft.reads.append(_ENDINGS[ending].replace("real", f"({real})"))


def shared_prompts(draft: Draft) -> None:
    """Compute what several rows begin with once, and give all that the model gives. Every attention has a diagonal in most programs."""
    draft.share = True
    draft.unpad = draft.maybe(4)
    sizes = draft.sizes
    heads = draft.pick(2, 1)
    length = max(sizes["q"], draft.pick(4, 5, 8, 11))
    sizes.update(
        b=max(sizes["b"], draft.pick(2, 3, 4)), kv=heads, h=heads, q=length, k=length, d=draft.pick(4, 8), fill=0
    )
    if length > 16:
        # Of a GPU: its kernels take no smaller ones.
        sizes["d"] = 16
    sizes["e"] = sizes["d"]
    if draft.maybe(3):
        draft.others = {**sizes, "b": draft.number(2, 5)}
    wide = "h*d"
    given = draft.new("pad", ("b", "q"), "filled", grad=False)
    ids, table = draft.new("ids", ("b", "q"), "alike"), draft.new("t", (3, wide), grad=draft.grads)
    draft.add(f"x = F.embedding({ids}, {table})", f"n, real = x.shape[1], {given}")
    shapes = {"w": (wide,), "p": ("q", wide), "m": (wide, wide)}
    for name, shape in shapes.items():
        draft.add(f"{name} = {draft.new(name, shape, 'normal' if name != 'm' else 'small')}")
    at = "torch.arange(n, device=x.device)"
    near = f"{at}[:, None] - {at}[None, :]"
    band = draft.pick(*[f"({near} >= 0)"] * 4, *[f"(({near} >= 0) & ({near} < 3))"] * 4, f"(({near}).abs() <= 1)")
    keys = draft.pick("", "", f" & ({given} != 0)[:, None, None, :]")
    draft.add(f"allowed = {band}[None, None]{keys}")
    alone = [step for step in _ALONE if " r" not in step and "x.shape[0]" not in step]
    for _ in range(draft.number(1, 2)):
        for _ in range(draft.number(0, 2)):
            draft.add(draft.pick(*_TOGETHER) if draft.maybe(8) else draft.pick(*alone))
        _attention(draft, wide)
    for _ in range(draft.pick(1, 2)):
        ending = draft.pick(*("x", "x[:, 0]", "x[:, -1]", "x.transpose(0, 1)", _LOSS) * 4, *_ENDINGS)
        if "y." in ending or "y[" in ending or "(y" in ending:
            _labels(draft)
        out = draft.name("o")
        draft.add(f"{out} = {ending}")
        draft.outputs.append(out)
        # Beside `unpad`, padding is given as 0 where rows can not share.
        draft.reads.append(_ENDINGS[ending].replace("real", f"({given})") if draft.unpad else "{}")


def _tokens(draft: Draft) -> str:
    """Which tokens are real, as whole numbers (b, q), of an input: by what the caller reads as well."""
    kind = draft.pick("filled", "filled", "filled", "padding")
    name = draft.new("pad", ("b", "q"), kind, grad=False)
    forms = {"{}": "{}", "{}.flip(1)": "{}", "1 - {}": "(1 - {})", "{}.bool()": "{}.long()", "{} == 0": "(~{}).long()"}
    layout = draft.pick(*forms, "{}", "{}", "{}.flip(1)")
    # The last input is this one.
    draft.inputs[-1] = dataclasses.replace(draft.inputs[-1], layout=layout)
    return forms[layout].format(name)


def _embedded(draft: Draft, wide: str) -> str:
    if draft.maybe(3):
        ids, table = draft.new("ids", ("b", "q"), "ids"), draft.new("t", (3, wide), grad=draft.grads)
        return f"F.embedding({ids}, {table}{draft.pick('', '', ', scale_grad_by_freq=True')})"
    return draft.new("x", ("b", "q", wide), grad=draft.grads)


def _allowed(draft: Draft, given: str) -> str:
    """Which keys a query sees: all real ones, or fewer by position; of the input itself, which is what a graph can be packed by."""
    layout = next(i.layout for i in draft.inputs if i.name == given)
    keys = f"({given}[:, None, None, :] {'== 0' if layout in ('1 - {}', '{} == 0') else '!= 0'})"
    at = "torch.arange(n, device=x.device)"
    near = f"{at}[:, None] - {at}[None, :]"
    band = draft.pick("", "", f"({near} >= 0)", f"(({near}).abs() <= 1)", f"(({near} >= 0) & ({near} < 3))")
    allowed = f"{keys} & {band}[None, None]" if band else keys
    number = "torch.finfo(D).min"
    forms = (
        allowed,
        allowed,
        f"({allowed}).expand(-1, 1, n, n)",
        f"torch.where({allowed}, torch.zeros((), dtype=D, device=x.device), {number})",
        f"torch.zeros((), dtype=D, device=x.device).masked_fill(~({allowed}), -inf)",
        f"(1.0 - ({allowed}).to(D)) * {number}",
    )
    return str(draft.pick(*forms))


def _steps(draft: Draft) -> None:
    for _ in range(draft.number(0, 2)):
        step = draft.pick(*_TOGETHER) if draft.maybe(6) else draft.pick(*_ALONE)
        draft.add(step)


def _attention(draft: Draft, wide: str) -> None:
    if draft.maybe(3):
        packed = draft.new("m", (wide, f"3*{wide}"), "small")
        draft.add(f"q, k, v = (x @ {packed}).chunk(3, -1)")
    else:
        for name in "qkv":
            form = draft.pick("x", "x", "x * w", "x @ m", "x + p")
            draft.add(f"{name} = {form}")
    heads, width = draft.sizes["h"], draft.sizes["d"]
    split = (
        f"unflatten(-1, ({heads}, {width})).transpose(1, 2)",
        f"view(x.shape[0], n, {heads}, {width}).transpose(1, 2)",
        f"reshape(x.shape[0], -1, {heads}, {width}).permute(0, 2, 1, 3)",
    )
    for name in "qkv":
        draft.add(f"{name} = {name}.{draft.pick(*split)}")
    scale = draft.pick("", "", ", scale=0.5")
    draft.add(f"y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed{scale}).transpose(1, 2)")
    back = draft.pick("y.flatten(2)", "y.reshape(x.shape)", "y.contiguous().view(x.shape)")
    draft.add(f"x = {draft.pick('x + ', 'x + ', '')}{back}")


def _labels(draft: Draft) -> None:
    ids = draft.new("ids", ("b", "q"), "ids")
    # Most are ignored at padding; of the rest the model's own graph has to be run.
    forms = f"y = {ids}.masked_fill(real == 0, -100)", f"y = torch.where(real != 0, {ids}, -100)"
    draft.add(draft.pick(*forms, f"y = {ids} * 1"))
