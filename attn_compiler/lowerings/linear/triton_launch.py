"""Calls the forward kernels of linear attention. Imports triton, so it comes late."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.linear.kernels import channel, forward as kernels
from attn_compiler.lowerings.linear.triton_sizes import (
    LinearSizes,
    empty,
    in_half,
    readable,
    state_strides,
    strides,
    tile,
    wide,
)
from attn_compiler.lowerings.shared.launching.launch import Arguments, launch
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.lowerings.shared.launching.replaying import Alike, alike
from attn_compiler.spec.linear import LinearForm

#: axes of operands, for the names of their strides
AXES = {"q": "bsh", "k": "bsh", "v": "bsh", "g": "bsh", "beta": "bsh"}

#: rows of a chunk that a program has, where each channel has a decay
BLOCK = 16
#: tensors of kernels that may be absent
_OPTIONAL = (
    "Skip",
    "First",
    "Out",
    "Last",
    "States",
    "Values",
    "Grad_values",
    "Inverse",
    "Queries",
    "Early",
    "Later",
    "Grad_first",
    "Part_skip",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearTensors:
    """A call's tensors as kernels read them, by name, and what follows from its form.

    named: q, k, v, g, beta, and perhaps skip and state; later what kernels make of them.
    """

    form: LinearForm
    sizes: LinearSizes
    named: dict[str, Tensor]
    same: Alike

    @staticmethod
    def of(op: str, given: dict[str, Tensor | None], text: str, *more: Tensor) -> LinearTensors:
        """more: further tensors that tell calls apart."""
        form = LinearForm.of_text(text)
        named = {
            name: readable(x, last=name in ("q", "k", "v") or (name == "g" and form.channel))
            for name, x in given.items()
            if x is not None
        }
        sizes = LinearSizes.of(named["q"], named["v"], is_half=in_half(named["q"], named["k"], named["v"]))
        same = alike(op, f"{text} {list(named)}", [*named.values(), *more])
        return LinearTensors(form=form, sizes=sizes, named=named, same=same)

    @property
    def is_delta(self) -> bool:
        return self.form.recurrence == "delta"

    @property
    def numbers(self) -> dict[str, Any]:
        """What kernels have of all calls alike."""
        form = self.form
        scale = self.sizes.dim_k**-0.5 if self.is_delta else 1.0
        return {
            **self.sizes.numbers,
            **strides(self.named, AXES),
            "scale": scale,
            "eps": form.eps or 0.0,
            "DELTA": self.is_delta,
            "CHANNEL": form.channel,
            "NORM": form.eps is not None,
            "OF_OUT": self.sizes.parts if form.out_dtype == "float32" else self.sizes.fewer,
        }

    def arguments(self, kernel: Any, programs: int, warps: int = 4, stages: int = 2, **more: Any) -> Arguments:
        """Of a kernel whose tensors are called as in `named`, but for capitals."""
        tensors = {name: name.lower() for name in kernel.arg_names if name[0].isupper() and name.lower() in self.named}
        absent = {name: None for name in _OPTIONAL if name in kernel.arg_names}
        numbers = {**self.numbers, **more}
        return Arguments(
            grid=(programs, 1, 1),
            tensors={**absent, **tensors},
            numbers={name: value for name, value in numbers.items() if name in kernel.arg_names},
            tile=tile(self.sizes, warps, stages),
        )

    def run(self, kernel: Any, programs: int, warps: int = 4, stages: int = 2, **more: Any) -> None:
        """Launch a kernel."""
        launch(
            kernel, self.same, self.named, functools.partial(self.arguments, kernel, programs, warps, stages, **more)
        )


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None, text: str
) -> tuple[Tensor, Tensor]:
    """As `linear_chunks`."""
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "skip": skip, "first": state}
    call = LinearTensors.of("linear_chunks", given, text)
    with on(v.device):
        out, last = outputs(call.form, q, v)
        call.named.update(out=out, last=last)
        if v.shape[1] == 1:
            _one_token(call)
        else:
            chunks(call)
            states(call)
    return out, last


def outputs(form: LinearForm, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Unfilled: the result, and the last state in the function's order."""
    batch, _, heads, dim_v = v.shape
    dim_k = q.shape[3]
    state = (batch, heads, dim_v, dim_k) if form.recurrence == "ssd" else (batch, heads, dim_k, dim_v)
    out = torch.empty(v.shape, dtype=getattr(torch, form.out_dtype), device=v.device)
    return out, torch.empty(state, dtype=getattr(torch, form.state_dtype), device=v.device)


def chunks(call: LinearTensors) -> None:
    """Make what does not depend on the state."""
    sizes, named = call.sizes, call.named
    q, many = named["q"], (sizes.batch, sizes.heads, sizes.chunks)
    named["pairs"] = sizes.in_parts((*many, sizes.chunk, sizes.chunk), q)
    named["norms"] = empty((*many, 2, sizes.chunk), q)
    if call.is_delta:
        named["inverse"] = sizes.in_parts((*many, sizes.chunk, sizes.chunk), q)
    if not call.form.channel:
        named["sums"] = empty((*many, 2, sizes.chunk), q)
        call.run(kernels.head_chunks, sizes.rows * sizes.chunks)
        return
    rows = (*many, sizes.chunk, wide(sizes.dim_k))
    named["sums"] = empty(rows, q)
    named.update({name: sizes.in_parts(rows, q) for name in ("queries", "early", "later")})
    named["lower"] = empty((*many, sizes.chunk, sizes.chunk), q)
    call.run(channel.channel_sums, sizes.rows * sizes.chunks, 8)
    call.run(channel.channel_pairs, sizes.rows * sizes.chunks * (sizes.chunk // BLOCK), 8)
    call.run(channel.channel_inverse, sizes.rows * sizes.chunks)


def states(call: LinearTensors) -> None:
    """Go over the states."""
    call.run(kernels.state_pass, call.sizes.rows * call.sizes.blocks, 4, stages_of(call), **_states(call))


def stages_of(call: LinearTensors) -> int:
    """Of a pass over states: tiles of the next chunk are fetched ahead where shared memory has room for two chunks."""
    return 1 if call.form.channel or not call.sizes.parts else 2


def _one_token(call: LinearTensors) -> None:
    call.run(kernels.one_token, call.sizes.rows * call.sizes.blocks, **_states(call))


def _states(call: LinearTensors) -> dict[str, int]:
    named, form = call.named, call.form
    return {**state_strides(form, named.get("first"), "first"), **state_strides(form, named.get("last"), "last")}
