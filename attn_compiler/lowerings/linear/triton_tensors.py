"""A call's tensors in the layouts that kernels of linear attention read, and their launches. Imports triton, so it is imported late."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_compiler.lowerings.linear.triton_sizes import LinearSizes, in_half, readable, strides, tile
from attn_compiler.lowerings.shared.launching.launch import Arguments, ReadyKernel, launch
from attn_compiler.lowerings.shared.launching.replaying import VECTOR, CallCache, call_cache
from attn_compiler.spec.linear import LinearForm
from attn_compiler.spec.target import Target

#: axes of operands, for the names of their strides
AXES = {"q": "bsh", "k": "bsh", "v": "bsh", "g": "bsh", "beta": "bsh"}
#: channels of heads of k and v, and dtype of results, for which kernels for Hopper were timed: with the delta rule, and without it
_TIMED = {True: (128, 128, "bfloat16"), False: (128, 64, "float32")}


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearTensors:
    """A call's tensors by name, as kernels read them, and the call's form and sizes.

    named: q, k, v, g, beta, and perhaps skip and state; later the kernels' results. on_hopper: kernels for Hopper run.
    """

    form: LinearForm
    sizes: LinearSizes
    named: dict[str, Tensor]
    same: CallCache
    on_hopper: bool

    @staticmethod
    def of(op: str, given: Mapping[str, Tensor | None], text: str, *grads: Tensor) -> LinearTensors:
        """Build the tensors of a call. grads: of the outputs, in a backward."""
        form = LinearForm.from_text(text)
        named = {
            name: readable(x, last=name in ("q", "k", "v") or (name == "g" and form.channel))
            for name, x in given.items()
            if x is not None
        }
        is_half, channels = in_half(named["q"], named["k"], named["v"]), form.channel and op == "linear_chunks"
        sizes = LinearSizes.of(named["q"], named["v"], is_half=is_half, precision=form.precision, has_channels=channels)
        same = call_cache(op, f"{text} {list(named)}", [*named.values(), *grads])
        read = [named["q"], named["k"], named["v"], *grads[:1]]
        find = functools.partial(_is_for_hopper, form, sizes, read, is_backward=bool(grads))
        return LinearTensors(form=form, sizes=sizes, named=named, same=same, on_hopper=same.fact("on_hopper", find))

    @property
    def is_delta(self) -> bool:
        return self.form.recurrence == "delta"

    @property
    def numbers(self) -> dict[str, Any]:
        """Arguments that all kernels share."""
        form = self.form
        scale = self.sizes.dim_k**-0.5 if self.is_delta else 1.0
        of_out = self.sizes.parts if form.out_dtype == "float32" else self.sizes.fewer
        return {
            **self.sizes.numbers,
            **strides(self.named, AXES),
            "scale": scale,
            "eps": form.eps or 0.0,
            "DELTA": self.is_delta,
            "CHANNEL": form.channel,
            "NORM": form.eps is not None,
            "pieces": 1,
            "of_piece": self.sizes.chunks,
            "first_p": 0,
            "last_p": 0,
            "WIDE": self.sizes.numbers["WV"],
            "OF_OUT": of_out,
            "OF_PAIRS": self.sizes.parts if "grad" in self.named else of_out,
        }

    def arguments(self, kernel: Any, programs: int, warps: int = 4, stages: int = 2, **more: Any) -> Arguments:
        """Arguments of a kernel, whose tensors have the names of `named`, capitalised. None: one that the call does not have."""
        numbers = {**self.numbers, **more}
        tensors = [name for name in kernel.arg_names if name[0].isupper() and name not in numbers]
        return Arguments(
            grid=(programs, 1, 1),
            tensors={name: name.lower() if name.lower() in self.named else None for name in tensors},
            numbers={name: value for name, value in numbers.items() if name in kernel.arg_names},
            tile=tile(self.sizes, warps, stages, more.get("registers")),
        )

    def run(
        self, kernel: Any, programs: int, warps: int = 4, stages: int = 2, *, part: str = "", **more: Any
    ) -> ReadyKernel | None:
        """Launch a kernel. part: tells launches of one kernel in one call apart. Returns the launch for replays."""
        arguments = functools.partial(self.arguments, kernel, programs, warps, stages, **more)
        return launch(kernel, self.same, self.named, arguments, part)

    def having(self, **named: Tensor) -> LinearTensors:
        """Return the call with these tensors in place of others."""
        return dataclasses.replace(self, named={**self.named, **named})

    def without(self, *names: str) -> LinearTensors:
        """Return the call without these tensors."""
        return dataclasses.replace(self, named={name: x for name, x in self.named.items() if name not in names})


def _is_for_hopper(form: LinearForm, sizes: LinearSizes, read: Sequence[Tensor], *, is_backward: bool) -> bool:
    """Return whether kernels for Hopper were timed on such a call, and the copy engine can read its operands. A backward's are of a decay
    for each head; the state space's read rows of all heads."""
    is_delta = form.recurrence == "delta"
    is_timed = sizes.parts and (sizes.dim_k, sizes.dim_v, form.out_dtype) == _TIMED[is_delta]
    if not is_timed or (is_backward and form.channel) or not _has_wgmma(read[0].device):
        return False
    return all(_is_copied(x, x.shape[2] if is_backward and not is_delta else 1) for x in read)


def _is_copied(x: Tensor, heads: int) -> bool:
    """Return whether the copy engine can read x (B, S, H, D): rows begin at whole vectors, and one ends before the next begins. heads: of
    a row.

    The second rule is that of `globalStrides` in CUDA's `cuTensorMapEncodeTiled`.
    """
    begins = [x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1])]
    return not any(at % VECTOR for at in begins) and x.stride(1) >= (heads - 1) * x.stride(2) + x.shape[3]


@functools.cache
def _has_wgmma(device: torch.device) -> bool:
    target = Target.current(str(device))
    return target.sm == 90 and not target.without_wgmma
