"""What our kernels' backwards share on tensors: what is allocated, what each kernel is launched with, what is replayed. As forward_call.py.

Imports triton, so it comes late.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from attn_compiler.lowerings.shared.arguments import (
    Prepared,
    alignment,
    common,
    operand_parameters,
    prepare,
    strides,
)
from attn_compiler.lowerings.shared.by_definition import Attention
from attn_compiler.lowerings.shared.launching import Arguments, ReadyKernel
from attn_compiler.lowerings.shared.leaf_calls import (
    BackwardArguments,
    BackwardBody,
    Gradients,
    backward_inputs,
)
from attn_compiler.lowerings.shared.on_device import on
from attn_compiler.lowerings.shared.ops import empty_gradient
from attn_compiler.lowerings.shared.readable import is_unreadable, readable
from attn_compiler.lowerings.shared.replaying import Alike, alike

#: names of a backward's inputs, before those of the operands
_INPUTS = ("GradOut", "GradLse", "Q", "K", "V", "Out", "Lse")


@dataclass(frozen=True, kw_only=True)
class Backward:
    """What the kernels of one backward share.

    tensors: Q, K, V, GradOut, GradLse, Out, Lse, RowStats and the operands by their names; each kernel adds its own outputs.
    start: launches a kernel (shared.launching.launch).
    ran: what was launched so far.
    """

    prepared: Prepared
    same: Alike
    tensors: dict[str, torch.Tensor]
    start: Callable[..., ReadyKernel | None]
    ran: list[ReadyKernel | None] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        q, k, v, grad_out, out = (self.tensors[name] for name in ("Q", "K", "V", "GradOut", "Out"))
        shared = common(self.prepared, self.tensors) | strides("g", grad_out)
        rows = self.tensors["RowStats"].shape[3]
        return shared | {"ALIGN": alignment(q, k, v, grad_out, out), "stats_rows": rows}

    @property
    def keeps_scores(self) -> bool:
        """Whether the pass over the keys comes first, and keeps the scores' gradients for the others."""
        return "Scores" in self.tensors

    def parameters(self, *outputs: str) -> dict[str, str | None]:
        names = {name: name for name in ("Q", "K", "V", "GradOut", "RowStats", *outputs)}
        return {**names, **operand_parameters(self.prepared)}

    @property
    def scores(self) -> dict[str, str | None]:
        """The parameter for kept scores."""
        return {"Scores": "Scores" if self.keeps_scores else None}

    @property
    def pitch(self) -> dict[str, int]:
        """Elements from one row of kept scores to the next."""
        return {"pitch": self.tensors["Scores"].stride(2) if self.keeps_scores else 0}

    def launch(self, kernel: Any, arguments: Callable[[Backward], Arguments], part: str = "") -> None:
        self.ran.append(self.start(kernel, self.same, self.tensors, functools.partial(arguments, self), part))


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardByKernels(BackwardBody):
    """operands: names of those that the op takes, in order.
    rows_together: row stats come in multiples of so many rows, which every kernel's block of queries divides.
    start: launches a kernel (shared.launching.launch).
    make_room: allocates what the kernels write besides the row stats and the gradients of q, k and v.
    run: launches the kernels, and gives the gradients of the operands that have one, in the plan's order.
    """

    operands: Callable[[Prepared], tuple[str, ...]]
    rows_together: Callable[[Prepared], int]
    start: Callable[..., ReadyKernel | None]
    make_room: Callable[[Backward], None]
    run: Callable[[Backward], list[torch.Tensor]]

    def definition(self, given: BackwardArguments) -> Attention:
        prepared = prepare(given.text)
        tensors = dict(zip(self.operands(prepared), given.operands, strict=True))
        return prepared.attention(given.q, given.k, given.v, tensors)

    def differentiable(self, given: BackwardArguments) -> tuple[str, ...]:
        return prepare(given.text).plan.differentiable

    def first(self, given: BackwardArguments, same: Alike) -> Gradients:
        """Gradients of q, k, v and of the plan's differentiable operands, as `ops.BACKWARD_SCHEMA` says."""
        with on(given.q.device):
            shared = self.begin(*given)
            further = self.run(shared)
            if shared.prepared.call.spec.mask.means:
                from attn_compiler.lowerings.shared import keyless_launch

                keyless_launch.add_gradients(shared)
            self._keep(shared)
        grads = shared.tensors
        return grads["GradQ"], grads["GradK"], grads["GradV"], further

    def begin(self, *arguments: Any) -> Backward:
        """One call, with room for all that its kernels write. Tensors that they can't read are copied.

        arguments: as in BackwardArguments.
        """
        given = BackwardArguments(*arguments)
        q, k, v, grad_out, grad_lse, lse = given.q, given.k, given.v, given.grad_out, given.grad_lse, given.lse
        prepared = prepare(given.text)
        same = alike(self.op, given.text, backward_inputs(given))
        same.any_size = prepared.any_size
        if same.fact("unreadable", lambda: is_unreadable(q, k, v, grad_out)):
            q, k, v, grad_out = map(readable, (q, k, v, grad_out))
            return self.begin(*given._replace(q=q, k=k, v=v, grad_out=grad_out))
        same.fact("copies", lambda: not grad_lse.is_contiguous())
        names = (*_INPUTS, *self.operands(prepared))
        inputs = backward_inputs(given._replace(grad_lse=grad_lse.contiguous()))
        tensors = dict(zip(names, inputs, strict=True))
        rows_together = self.rows_together(prepared)
        tensors["RowStats"] = same.empty("RowStats", lambda: _empty_row_stats(lse, rows_together))
        for name in ("Q", "K", "V"):
            tensors[f"Grad{name}"] = same.empty(f"Grad{name}", functools.partial(empty_gradient, tensors[name]))
        shared = Backward(prepared=prepared, same=same, tensors=tensors, start=self.start)
        self.make_room(shared)
        return shared

    def _keep(self, shared: Backward) -> None:
        """Further calls like this one are replayed, if nothing was copied."""
        if shared.same.facts["copies"]:
            return
        of_operands = [f"Grad{name.capitalize()}" for name in shared.prepared.plan.differentiable]
        shared.same.keep(
            shared.ran,
            inputs=(*_INPUTS, *self.operands(shared.prepared)),
            returned=("GradQ", "GradK", "GradV", of_operands),
        )


def _empty_row_stats(lse: torch.Tensor, together: int) -> torch.Tensor:
    """(B, Hq, 2, rows), whole blocks. One at least: without queries, too, the kernel that comes first has something to start for."""
    batch, heads, seqlen_q = lse.shape
    rows = max(triton.cdiv(seqlen_q, together), 1) * together
    return torch.empty((batch, heads, 2, rows), dtype=torch.float32, device=lse.device)
