"""Attention whose lengths change from call to call, as models write it: one graph serves all lengths after the first one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.spec.attention import TensorSpec
from tests.lowerings.kernel_problems import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """padded: on the left, another number of tokens for each batch row. window: keys that a query sees, None for all before it."""

    name: str
    padded: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


FORMS = (
    Form(name="causal"),
    Form(name="padded", padded=True),
    Form(name="window", window=40),
    Form(name="padded window", padded=True, window=40),
    Form(name="softcap", padded=True, softcap=20.0),
    Form(name="sinks", sinks=True),
    Form(name="padded window with sinks", padded=True, window=40, sinks=True),
)

#: odd ones, ones of part of a tile, multiples of a tile; the second one makes the graph for all
LENGTHS = (160, 129, 64, 301, 77)


def attention(form: Form, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, padding: Tensor) -> Tensor:
    """As models of transformers spell it out in eager mode."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ keys.transpose(2, 3) * q.shape[3] ** -0.5
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    at = torch.arange(q.shape[2], device=q.device)
    allowed = (at <= at[:, None])[None, None]
    if form.window is not None:
        allowed = allowed & (at > at[:, None] - form.window)
    if form.padded:
        allowed = allowed & padding[:, None, None, :]
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if not form.sinks:
        return torch.softmax(scores, -1) @ values
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    together = torch.cat([scores, column], -1)
    together = together - together.max(-1, keepdim=True).values
    return torch.softmax(together, -1)[..., :-1] @ values


def check(
    form: Form,
    compile_: Callable[..., Any],
    *,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    within: float,
    lengths: Sequence[int] = LENGTHS,
) -> None:
    """Forward and backward at each length, twice: the second call of a length may be replayed. Held against the same in float64."""

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, padding: Tensor) -> Tensor:
        return attention(form, q, k, v, sinks, padding)

    compiled = compile_(function)
    generator = torch.Generator().manual_seed(0)
    for length in (*lengths, *lengths[:2]):
        shapes = [(2, length, heads, head_dim) for heads in (4, 2, 2)]
        given = [torch.randn(s, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_() for s in shapes]
        given.append(torch.randn(4, generator=generator).to(device, dtype).requires_grad_())
        first = torch.tensor([0, length // 3], device=device)
        padding = torch.arange(length, device=device) >= first[:, None]
        exact = [x.detach().double().requires_grad_() for x in given]
        out, right = compiled(*given, padding), function(*exact, padding)
        # Rows of padding have no keys.
        seen = padding[:, None, :, None] if form.padded else torch.ones_like(padding)[:, None, :, None]
        upstream = torch.randn(out.shape, generator=generator).to(device, dtype) * seen
        leaves = given if form.sinks else given[:3]
        found = [out * seen, *torch.autograd.grad(out, leaves, upstream)]
        wanted = [right * seen, *torch.autograd.grad(right, exact[: len(leaves)], upstream.double())]
        for mine, theirs in zip(found, wanted, strict=True):
            error = (mine.detach().double() - theirs.detach()).norm() / theirs.detach().norm()
            assert float(error) < within, (length, mine.shape)


def of_any_length(problem: Problem) -> Problem:
    """The same, with the text of a graph that serves every batch and length: equal for problems that differ in these alone."""
    call = Call.from_text(problem.text)

    def tensor(x: TensorSpec) -> TensorSpec:
        _, heads, _, width = x.shape
        return dataclasses.replace(x, shape=("s0", heads, "s1", width), strides=("s2", "s3", "s4", 1))

    spec = dataclasses.replace(call.spec, **{name: tensor(getattr(call.spec, name)) for name in "qkv"})
    return dataclasses.replace(problem, text=dataclasses.replace(call, spec=spec).to_text())


def at_each(build: Callable[[int], Problem], lengths: Sequence[int] = LENGTHS) -> list[Problem]:
    """Problems of one text."""
    found = [of_any_length(build(length)) for length in lengths]
    assert len({problem.text for problem in found}) == 1
    return found
