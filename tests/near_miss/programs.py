"""Random attentions as source text: layouts, repeated heads, products, steps on the scores in any order, writes and stopped gradients.

`programs` is a Hypothesis strategy. Most programs are attention in some spelling, many are near misses; which is which is not
said, since compiled code has to be right for both. A program never masks all keys of a query: there a kernel's zeros differ
from eager's mean of v by design.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from tests.near_miss.checking import condition, normal

Dims = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Input:
    """kind: "normal", "positive" (0-d), or "kept" (bool, True for the first query and key along `free` axes)."""

    name: str
    shape: tuple[int, ...]
    kind: str = "normal"
    grad: bool = False

    def make(self, seed: int, dtype: torch.dtype) -> torch.Tensor:
        if self.kind == "kept":
            return _kept(self.shape)
        value = normal(*self.shape, seed=seed)
        if self.kind == "positive":
            value = value.abs() * 0.2 + 0.1
        return value.to(dtype).requires_grad_(self.grad)


def _kept(shape: tuple[int, ...]) -> torch.Tensor:
    kept = condition(*shape)
    for axis in range(len(shape)):
        kept.select(axis, 0).fill_(True)
    return kept


@dataclass(frozen=True, kw_only=True)
class Program:
    """lines: the body of a function of `inputs`. outputs: names that it returns."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    dtype: torch.dtype
    dynamic: tuple[str, ...]

    @property
    def source(self) -> str:
        head = f"def attention({', '.join(i.name for i in self.inputs)}):"
        return "\n    ".join([head, *self.lines, f"return ({', '.join(self.outputs)},)"])

    def function(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "inf": float("inf")}
        # Under a file's name, without which torch 2.11 does not trace it.
        exec(compile(self.source, __file__, "exec"), scope)
        function: Callable[..., Any] = scope["attention"]
        return function

    def tensors(self) -> list[torch.Tensor]:
        return [x.make(seed, self.dtype) for seed, x in enumerate(self.inputs)]

    def __repr__(self) -> str:
        shapes = "\n".join(
            f"# {i.name}: {i.kind}{list(i.shape)}{' with gradient' if i.grad else ''}" for i in self.inputs
        )
        return f"\n{shapes}\n# {self.dtype}, dynamic: {self.dynamic}\n{self.source}\n"


@dataclass(kw_only=True)
class Draft:
    """A program that is being drawn. dims: what the dimensions of `s` mean; "bh" is a dimension of both."""

    draw: Any
    sizes: dict[str, int]
    grads: bool
    writes: bool
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    dims: Dims = ()
    causal_allowed: bool = True

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def maybe(self, one_in: int = 2) -> bool:
        return bool(self.draw(st.integers(0, one_in - 1)) == 0)

    def new(self, prefix: str, shape: Sequence[int], kind: str = "normal", *, grad: bool | None = None) -> str:
        name = f"{prefix}{len(self.inputs)}"
        wants = self.grads and kind != "kept" and (self.maybe() if grad is None else grad)
        self.inputs.append(Input(name=name, shape=tuple(shape), kind=kind, grad=wants))
        return name

    def add(self, *lines: str) -> None:
        self.lines.extend(lines)

    def size(self, axes: str) -> int:
        total = 1
        for axis in axes:
            total *= self.sizes[axis]
        return total


# ---- operands -------------------------------------------------------------------------------------------------------


def _operand(draft: Draft, name: str, heads: int, length: str) -> None:
    """A line that makes (B, heads, length, D) of an input in some layout, and up to three ops on it."""
    batch, seqlen, d = draft.sizes["b"], draft.sizes[length], draft.sizes["d"]
    layouts = {
        "{}": (batch, heads, seqlen, d),
        "{}.transpose(1, 2)": (batch, seqlen, heads, d),
        "{}.permute(1, 2, 0, 3)": (seqlen, batch, heads, d),
        "{}.mT": (batch, heads, d, seqlen),
        f"{{}}.unflatten(-1, ({heads}, {d})).transpose(1, 2)": (batch, seqlen, heads * d),
        f"{{}}.unflatten(-1, ({d}, {heads})).permute(0, 3, 1, 2)": (batch, seqlen, heads * d),
        "{}[:, :, 1].transpose(1, 2)": (batch, seqlen, 2, heads, d),
    }
    layout = draft.pick(*layouts)
    draft.add(f"{name} = {layout.format(draft.new(name, layouts[layout], grad=draft.grads))}")
    for _ in range(draft.draw(st.integers(0, 2))):
        _change_operand(draft, name)


def _change_operand(draft: Draft, name: str) -> None:
    changes = [
        "{0} = {0}.contiguous()",
        "{0} = {0}.clone()",
        "{0} = {0} * 0.5",
        "{0} = {0} / torch.full([], 4.0).sqrt()",
        "{0} = {0}.flip(2)",
        "{0} = {0}.unsqueeze(0).squeeze(0)",
        "{0} = {0}.transpose(1, 2).contiguous().transpose(1, 2)",
        "{0} = {0}.detach()",
        "with torch.no_grad(): {0} = {0} * 2",
        "with torch.no_grad(): {0} = {0}.contiguous()",
    ]
    if draft.writes:
        changes += ["{0}.mul_(2)", "{0}[:, :, 0].mul_(0)", "copy = {0}.clone(); copy[:, :1].add_(1); {0} = copy"]
    draft.add(draft.pick(*changes).format(name))


def _repeat_heads(draft: Draft, name: str, length: str) -> None:
    heads, kv = draft.sizes["h"], draft.sizes["kv"]
    if heads == kv:
        return
    group, d = heads // kv, draft.sizes["d"]
    forms = [
        f"{{0}} = {{0}}.repeat_interleave({group}, 1)",
        f"{{0}} = {{0}}[:, :, None].expand(-1, -1, {group}, -1, -1).flatten(1, 2)",
        f"{{0}} = {{0}}[:, :, None].expand(-1, -1, {group}, -1, -1).reshape(-1, {heads}, {{0}}.shape[2], {d})",
        f"{{0}} = {{0}}.repeat(1, {group}, 1, 1)",
        f"{{0}} = torch.stack([{{0}}] * {group}, 2).flatten(1, 2)",
        f"{{0}} = {{0}}[:, torch.arange({heads}) % {kv}]",
    ]
    draft.add(draft.pick(*forms).format(name))
    if draft.maybe(4):
        _change_operand(draft, name)


# ---- scores ---------------------------------------------------------------------------------------------------------


def _product(draft: Draft) -> None:
    form = draft.pick("matmul", "matmul", "swapped", "einsum", "bmm", "baddbmm")
    if form == "matmul":
        draft.add(f"s = {draft.pick('q @ k.mT', 'torch.matmul(q, k.transpose(-1, -2))')}")
        draft.dims = ("b", "h", "q", "k")
    elif form == "swapped":
        draft.add("s = k @ q.mT")
        draft.dims = ("b", "h", "k", "q")
    elif form == "einsum":
        out = "".join(draft.draw(st.permutations("bhqk")))
        draft.add(f"s = torch.einsum('bhqd,bhkd->{out}', q, k)")
        draft.dims = tuple(out)
    else:
        draft.dims = ("bh", "q", "k")
        q, k = "q.flatten(0, 1)", "k.flatten(0, 1).mT"
        if form == "bmm":
            draft.add(f"s = torch.bmm({q}, {k})")
        else:
            bias = _term(draft, "normal", keep_rank=True)
            draft.add(f"s = torch.baddbmm({bias}, {q}, {k}, beta={draft.pick(1, 0, 0.5)}, alpha={draft.pick(1, 0.5)})")


def _term(draft: Draft, kind: str, *, keep_rank: bool = False) -> str:
    """An input that broadcasts to the scores."""
    shape = [draft.size(dim) if draft.maybe() else 1 for dim in draft.dims]
    dropped = 0 if keep_rank else draft.draw(st.integers(0, len(shape) - 1))
    return draft.new("m", shape[dropped:], kind)


def _scale(draft: Draft) -> None:
    forms = [
        "s = s * 0.5",
        "s = s / 1.5",
        "s = 0.7 * s",
        "s = s * torch.tensor(0.5)",
        "s = s * torch.full((1, 1, 1), 0.5)",
        "s = s * torch.full((1, 1, 1, 1), 0.5)",
        "s = s * -0.5",
        "t = torch.ones(()); t.fill_(0.5); s = s * t",
        "t = torch.ones(1); t[0] = 0.5; s = s * t",
    ]
    if draft.maybe(3):
        scale = draft.new("t", (), "positive")
        forms = [f"s = s * {scale}", f"s = s / {scale}", f"s = {scale} * s"]
    elif draft.writes and draft.maybe(3):
        forms = ["s.mul_(0.5)", "s = s.div_(2)", "s *= 0.5"]
    draft.add(draft.pick(*forms))


def _bias(draft: Draft) -> None:
    term = _term(draft, draft.pick("normal", "normal", "normal", "kept"))
    forms = ["s = s + {}", "s = {} + s", "s = torch.add(s, {}, alpha=0.5)"]
    if not term or draft.inputs[-1].kind == "normal":
        forms += ["s = s - {}", *(["s += {}"] if draft.writes else [])]
    draft.add(draft.pick(*forms).format(term))


def _mask(draft: Draft) -> None:
    fill = draft.pick("-inf", "torch.finfo(s.dtype).min", "-1e9", "-65504.0")
    if draft.causal_allowed and draft.maybe():
        q, k = (next(i for i, dim in enumerate(draft.dims) if axis in dim) for axis in "qk")
        for name, at in (("i", q), ("j", k)):
            shape = ", ".join("-1" if n == at else "1" for n in range(len(draft.dims)))
            draft.add(f"{name} = torch.arange(s.shape[{at}]).view({shape})")
        kept = draft.pick(
            "(i >= j)", "(i + 1 > j)", "(i >= j) & (i - j < 3)", "(i >= j) | (j < 2)", "(i + 1 >= j)", "(j <= 0)"
        )
        draft.add(f"c = {kept}")
    else:
        draft.add(f"c = {_term(draft, 'kept')}")
    forms = [f"s = s.masked_fill(~c, {fill})", f"s = torch.where(c, s, {fill})", f"s = torch.where(~c, {fill}, s)"]
    forms += [f"s = s + torch.zeros_like(c, dtype=s.dtype).masked_fill(~c, {fill})"]
    forms += [f"n = torch.where(c, 0.0, {fill}).to(s.dtype); s = s + n"]
    if draft.writes:
        forms += [f"n = torch.where(c, 0.0, {fill}).to(s.dtype).clone(); n[..., 0] = 0.5; s = s + n"]
    draft.add(draft.pick(*forms))


def _cap(draft: Draft) -> None:
    draft.add(draft.pick("s = 5 * (s / 5).tanh()", "s = (s * 0.2).tanh() * 4.0", "s = s.tanh()"))


def _shift(draft: Draft) -> None:
    key = next(i for i, dim in enumerate(draft.dims) if "k" in dim)
    # Where a whole row or column is -inf, minus its maximum is NaN, which no two kernels treat alike.
    at = key if any("-inf" in line for line in draft.lines) else draft.pick(key, -1, -2)
    form = draft.pick("s.amax({}, keepdim=True)", "s.max({}, keepdim=True)[0]", "s.amax({}, keepdim=True).detach()")
    draft.add(f"s = s - {form.format(at)}")


def _turn(draft: Draft) -> None:
    if draft.maybe(3):
        draft.add(draft.pick("s = s.contiguous()", "s = s.unsqueeze(0).squeeze(0)", "s = s.clone()", "s = s.double()"))
        return
    if draft.dims[0] == "bh" and draft.maybe():
        draft.add(f"s = s.unflatten(0, (-1, {draft.sizes['h']}))")
        draft.dims = ("b", "h", *draft.dims[1:])
    elif draft.dims[:2] == ("b", "h") and draft.maybe():
        draft.add("s = s.flatten(0, 1)")
        draft.dims = ("bh", *draft.dims[2:])
    else:
        order = draft.draw(st.permutations(range(len(draft.dims))))
        draft.add(f"s = s.permute{tuple(order)}")
        draft.dims = tuple(draft.dims[i] for i in order)


def _look(draft: Draft) -> None:
    """Somebody else reads the scores, or writes to a part of them."""
    name = f"seen{len(draft.lines)}"
    if draft.writes and draft.maybe():
        draft.add(
            draft.pick("s.view(-1)[0] = 0" if draft.maybe(9) else "s.select(0, 0).mul_(0.5)", f"{name} = s[..., 0]")
        )
    else:
        draft.add(draft.pick(f"{name} = s.sum()", f"{name} = s.detach().max()", f"{name} = torch.zeros_like(s)"))
    if draft.lines[-1].startswith(name):
        draft.outputs.append(name)


def _clamp(draft: Draft) -> None:
    low = draft.pick("-1e30", "torch.finfo(s.dtype).min", "-65504.0", "-2.0")
    draft.add(draft.pick(f"s = s.clamp(min={low})", f"s = torch.maximum(s, torch.full([], {low}).to(s.dtype))"))


def _without_gradient(draft: Draft) -> None:
    draft.add(draft.pick("with torch.no_grad(): s = s * 1.5", "s = s.detach()"))


COMMON = (_scale, _bias, _mask, _mask, _cap, _turn)
RARE = (_shift, _look, _clamp, _without_gradient)


# ---- from the softmax to the output ---------------------------------------------------------------------------------


def _weights(draft: Draft) -> None:
    key = next(i for i, dim in enumerate(draft.dims) if "k" in dim)
    at = key if draft.causal_allowed else draft.draw(st.integers(0, len(draft.dims) - 1))
    sink = draft.dims[-1] == "k" and "bh" not in draft.dims and draft.maybe(5)
    if sink:
        logits = draft.new("sink", (draft.sizes["h"],))
        shape = ", ".join("-1" if dim == "h" else "1" for dim in draft.dims)
        draft.add(f"s = torch.cat([s, {logits}.view({shape}).expand(*s.shape[:-1], 1)], dim=-1)")
        if draft.maybe():
            draft.add(draft.pick("s = s - s.amax(-1, keepdim=True)", "s = s * 0.5", "s = s.clamp(min=-1e30)"))
    at = draft.pick(at, at - len(draft.dims))
    draft.add(
        draft.pick(
            f"w = s.softmax({at})", f"w = torch.softmax(s, {at})", f"w = F.softmax(s, dim={at}, dtype=torch.float64)"
        )
    )
    if sink:
        draft.add(draft.pick("w = w[..., :-1]", "w = w[..., :-1]", "w = w[..., 1:]"))
    if draft.writes and draft.maybe(4):
        draft.add(draft.pick("k.mul_(0.5)", "v.mul_(0.5)", "q[:, :, 0].mul_(0)", "v[:, :1].add_(1)"))
    for _ in range(draft.draw(st.integers(0, 1))):
        _change_weights(draft)
    draft.add("w = w.to(v.dtype)")


def _change_weights(draft: Draft) -> None:
    changes = [
        "w = w.contiguous()",
        "w = torch.dropout(w, 0.5, False)",
        "w = F.dropout(w, 0.0, training=True)",
        "w = w[..., :]",
        "w = w * 2",
        "w = w.detach()",
        "seen = w.sum(-1)",
        "seen = w",
    ]
    draft.add(draft.pick(*changes))
    if draft.lines[-1].startswith("seen"):
        draft.outputs.append("seen")


def _values(draft: Draft) -> None:
    dims = draft.dims
    if dims[0] == "bh" and dims[1:] in (("q", "k"), ("k", "q")) and draft.maybe():
        draft.add(f"o = torch.bmm(w{'' if dims[1:] == ('q', 'k') else '.mT'}, v.flatten(0, 1))")
        draft.add(f"o = o.unflatten(0, (-1, {draft.sizes['h']}))")
        return
    if "bh" in dims:
        at = dims.index("bh")
        draft.add(f"w = w.unflatten({at}, (-1, {draft.sizes['h']}))")
        dims = (*dims[:at], "b", "h", *dims[at + 1 :])
    if draft.maybe():
        draft.add(f"o = torch.einsum('{''.join(dims)},bhkd->bhqd', w, v)")
    else:
        draft.add(f"o = w.permute{tuple(dims.index(axis) for axis in 'bhqk')} @ v")


def _after(draft: Draft) -> None:
    for _ in range(draft.draw(st.integers(0, 2))):
        changes = [
            "o = o.contiguous()",
            "o = o * 2",
            "o = o.transpose(1, 2).contiguous().transpose(1, 2)",
            "r = o.transpose(1, 2).flatten(2); r += 1; {seen} = r.exp()",
            "r = o.contiguous(); r.mul_(2); {seen} = r.sum()",
            "o += 1",
            "{seen} = o.transpose(1, 2).flatten(2)",
            "o = F.scaled_dot_product_attention(o, k, v, scale=0.5)",
            "o = F.scaled_dot_product_attention(q, k, o) if o.shape == k.shape else o",
        ]
        seen = f"seen{len(draft.lines)}"
        line = draft.pick(*changes)
        draft.add(line.format(seen=seen))
        if "{seen}" in line:
            draft.outputs.append(seen)
    draft.outputs.append("o")


# ---- whole programs -------------------------------------------------------------------------------------------------


def _written_out(draft: Draft) -> None:
    for name, length in (("k", "k"), ("v", "k")):
        _repeat_heads(draft, name, length)
    _product(draft)
    draft.causal_allowed = draft.maybe(8) is False
    for _ in range(draft.draw(st.integers(0, 4))):
        draft.pick(*COMMON, *COMMON, *RARE)(draft)
    _weights(draft)
    _values(draft)


def _called(draft: Draft) -> None:
    grouped = draft.maybe()
    if not grouped:
        _repeat_heads(draft, "k", "k")
        _repeat_heads(draft, "v", "k")
    given = ["enable_gqa=True"] if grouped else []
    if draft.maybe():
        given.append(f"scale={draft.pick(0.3, 1.0)}")
    draft.dims = ("b", "h", "q", "k")
    mask = draft.pick("none", "causal", "kept", "bias", "read")
    if mask == "causal":
        given.append("is_causal=True")
    elif mask in ("kept", "bias"):
        given.append(f"attn_mask={_term(draft, 'kept' if mask == 'kept' else 'normal')}")
    elif mask == "read":
        draft.add("i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])")
        kept = draft.pick(
            "i >= j", "j <= i + 1", "(i >= j) & (j > i - 3)", "i - j > -1", "~(j > i)", "(j == 0) | (i > j)"
        )
        draft.add(f"c = {kept}")
        given.append("attn_mask=c")
    draft.add(f"o = F.scaled_dot_product_attention({', '.join(['q', 'k', 'v', *given])})")


@st.composite
def programs(draw: Any) -> Program:
    """One random program with its inputs."""
    kv = draw(st.sampled_from((1, 2)))
    sizes = {
        "b": draw(st.sampled_from((1, 2, 2, 3))),
        "kv": kv,
        "h": kv * draw(st.sampled_from((1, 1, 2, 3))),
        "q": draw(st.sampled_from((1, 3, 4, 6))),
        "k": draw(st.sampled_from((1, 3, 4, 6))),
        "d": draw(st.sampled_from((1, 4, 8))),
    }
    grads = draw(st.booleans())
    draft = Draft(draw=draw, sizes=sizes, grads=grads, writes=not grads and draw(st.booleans()))
    for name, heads, length in (("q", sizes["h"], "q"), ("k", kv, "k"), ("v", kv, "k")):
        _operand(draft, name, heads, length)
    draft.pick(_written_out, _written_out, _called)(draft)
    _after(draft)
    return Program(
        inputs=tuple(draft.inputs),
        lines=tuple(draft.lines),
        outputs=tuple(dict.fromkeys(draft.outputs)),
        dtype=draw(st.sampled_from((torch.float32, torch.float64))),
        dynamic=draw(st.sampled_from(((), (), ("b",), ("b", "q", "k")))),
    )
