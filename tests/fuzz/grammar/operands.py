"""q, k and v: layouts of the arguments, what the model does to them, and heads that are repeated."""

from __future__ import annotations

from tests.fuzz.grammar.draft import Draft


def operand(draft: Draft, name: str, heads: str, length: str, *, most: int = 2) -> None:
    """Lines that make (B, heads, length, D) of an input in some layout, and up to `most` ops on it."""
    n, width = draft.sizes[heads], "e" if name.startswith("v") else "d"
    d = draft.sizes[width]
    forms = {
        "{}": ("b", heads, length, width),
        "{}.transpose(1, 2)": ("b", length, heads, width),
        "{}.swapaxes(2, 1)": ("b", length, heads, width),
        "{}.permute(1, 2, 0, 3)": (length, "b", heads, width),
        "{}.movedim((0, 1), (2, 0))": (length, "b", heads, width),
        "{}.mT": ("b", heads, width, length),
        f"{{}}.unflatten(-1, ({n}, {d})).transpose(1, 2)": ("b", length, f"{heads}*{width}"),
        f"{{}}.unflatten(-1, ({d}, {n})).permute(0, 3, 1, 2)": ("b", length, f"{heads}*{width}"),
        f"{{0}}.view({{0}}.shape[0], -1, {n}, {d}).transpose(1, 2)": ("b", length, f"{heads}*{width}"),
        f"{{}}.reshape(-1, {n}, *{{}}.shape[1:])": (f"b*{heads}", length, width),
        "{}[:, :, 1].transpose(1, 2)": ("b", length, 2, heads, width),
        "{}.chunk(2, -1)[1]": ("b", heads, length, f"2*{width}"),
        "{}.narrow(2, 1, {}.shape[2] - 1)": None,
        "{}.unbind(2)[0].transpose(1, 2)": ("b", length, 3, heads, width),
        "{}.flatten(0, 1)": (1, "b", heads, length, width),
        "{}.squeeze(2)": ("b", heads, 1, length, width),
        "{}.contiguous().mT": ("b", heads, width, length),
    }
    if name != "q":
        # The same for every row of the batch, or for all heads of it.
        forms["{}.expand(q.shape[0], -1, -1, -1)"] = (heads, length, width)
        forms[f"{{}}.expand(q.shape[0], {n}, -1, -1)"] = (1, length, width)
    layout = draft.pick(*(form for form, shape in forms.items() if shape is not None))
    kind = draft.pick("normal", "normal", "normal", "normal", "large", "small") if name != "v" else "normal"
    given = draft.new(name, forms[layout], kind, grad=draft.grads and not draft.maybe(6))
    draft.add(f"{name} = {layout.replace('{0}', '{}').replace('{}', given)}")
    for _ in range(draft.number(0, most)):
        change_operand(draft, name)


_PLAIN = (
    "{0} = {0}.contiguous()",
    "{0} = {0}.clone()",
    "{0} = {0} * 0.5",
    "{0} = 1.5 * {0}",
    "{0} = {0} / 2.0",
    "{0} = {0} / torch.full([], 4.0).sqrt()",
    "{0} = {0} * -0.5",
    "{0} = {0}.flip(2)",
    "{0} = {0}.unsqueeze(0).squeeze(0)",
    "{0} = {0}.transpose(1, 2).contiguous().transpose(1, 2)",
    "{0} = {0}.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)",
    "{0} = {0}.flatten(0, 1).unflatten(0, ({0}.shape[0], -1))",
    "{0} = {0}.reshape(-1, {0}.shape[-1]).view({0}.shape)",
    "{0} = {0}.to(W).to(D)",
    "{0} = {0} + 1",
    "{0} = {0}.to(torch.bfloat16).to(D)",
    "{0} = {0}[:, :, :]",
    "{0} = {0}[:, :1].expand({0}.shape)",
    "{0} = {0}[:1].expand_as({0})",
    "{0} = {0}[0].expand({0}.shape)",
    "{0} = {0}[0, -1].expand({0}.shape)",
    "{0} = torch.cat([{0}[:, :1], {0}[:, 1:]], 1)",
    "{0} = {0}.roll(1, 2)",
)
_STOPPED = (
    "{0} = {0}.detach()",
    "with torch.no_grad(): {0} = {0} * 2",
    "with torch.no_grad(): {0} = {0}.contiguous()",
)
_WRITTEN = (
    "{0}.mul_(2)",
    "{0}.div_(2)",
    "{0}[:, :, :1].mul_(0)",
    "copy = {0}.clone(); copy[:, :1].add_(1); {0} = copy",
    "{0} = {0} * 1; {0}.add_(0.5)",
    "kept = {0}; {0} = {0}.contiguous(); kept.data.add_(1)",
    "kept = {0}; {0} = {0} * 0.5; kept.data.mul_(2)",
    "kept = {0}; {0} = {0}.clone(); kept.data.zero_()",
    "kept = {0}; {0} = {0} * 0.5; kept.detach().mul_(2)",
    "kept = {0}; {0} = {0}.clone(); kept.detach().add_(1)",
    "kept = {0}; {0} = 2.0 * {0}; kept.detach()[..., 0] = 0.5",
)


def change_operand(draft: Draft, name: str) -> None:
    """A line that leaves the shape as it is."""
    changes = [*_PLAIN, *_PLAIN, *(_STOPPED if draft.grads else ()), *(_WRITTEN if draft.writes else ())]
    draft.add(draft.pick(*changes).format(name))


def write_root(draft: Draft, name: str) -> None:
    """What an operand was made of is written, or a copy of it."""
    draft.add(draft.pick(*_WRITTEN[3:]).format(name))


def repeat_heads(draft: Draft, name: str) -> None:
    """As many heads as q has; each form says which query head reads which."""
    heads, kv = draft.sizes["h"], draft.sizes["kv"]
    if name in draft.repeated:
        return
    draft.repeated.add(name)
    if heads == kv and not draft.maybe(6):
        return
    group = heads // kv
    forms = [
        f"{{0}} = {{0}}.repeat_interleave({group}, 1)",
        f"{{0}} = {{0}}[:, :, None].expand(-1, -1, {group}, -1, -1).flatten(1, 2)",
        f"{{0}} = {{0}}[:, :, None].expand(-1, -1, {group}, -1, -1).reshape({{0}}.shape[0], {heads}, *{{0}}.shape[2:])",
        f"{{0}} = {{0}}.unsqueeze(2).repeat(1, 1, {group}, 1, 1).flatten(1, 2)",
        f"{{0}} = {{0}}.repeat(1, {group}, 1, 1)",
        f"{{0}} = {{0}}[:, None].expand(-1, {group}, -1, -1, -1).flatten(1, 2)",
        f"{{0}} = torch.stack([{{0}}] * {group}, 2).flatten(1, 2)",
        f"{{0}} = {{0}}[:, torch.arange({heads}, device={{0}}.device) % {kv}]",
    ]
    draft.add(draft.pick(*forms).format(name))
    if draft.maybe(4):
        change_operand(draft, name)


def operands(draft: Draft, *, most: int = 2) -> None:
    """q, k and v."""
    for name, heads, length in (("q", "h", "q"), ("k", "kv", "k"), ("v", "kv", "k")):
        operand(draft, name, heads, length, most=most)


def plain_operands(draft: Draft) -> None:
    """q, k and v as they come: (B, H, S, D)."""
    for name, heads, length, width in (("q", "h", "q", "d"), ("k", "kv", "k", "d"), ("v", "kv", "k", "e")):
        draft.add(f"{name} = {draft.new(name, ('b', heads, length, width), grad=draft.grads)}")


def write_later(draft: Draft) -> None:
    """Something that was read before is written after the attention."""
    floats = [i.name for i in draft.inputs if i.kind in ("normal", "large", "small") and i.shape]
    name = draft.pick("q", "k", "v", *floats, *floats)
    forms = [
        "{0}.data.add_(1.0)",
        "{0}.data.mul_(2.0)",
        "{0}.data.zero_()",
        "{0}.add_(1.0)",
        "{0}.mul_(0.5)",
        "with torch.no_grad(): {0}.add_(1.0)",
        "{0}.detach().mul_(3.0)",
        "{0}.detach().zero_()",
        "{0}.detach()[..., 0] = 0.5",
        "{0}.data[..., 0] = 0.5",
        "{0}.data.copy_({0}.data.flip(-1))",
    ]
    draft.add(draft.pick(*forms).format(name))
