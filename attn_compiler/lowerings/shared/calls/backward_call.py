"""Steps that our kernels' backwards share, as forward_call.py: allocation, launches, replay. Imports triton, so it is imported late."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attn_compiler.lowerings.shared.calls.arguments import Prepared, is_unreadable, prepare, readable
from attn_compiler.lowerings.shared.calls.backward import Backward
from attn_compiler.lowerings.shared.calls.by_definition import Attention
from attn_compiler.lowerings.shared.calls.leaf_calls import BackwardArguments, BackwardBody, Gradients, backward_inputs
from attn_compiler.lowerings.shared.launching.launch import ReadyKernel
from attn_compiler.lowerings.shared.launching.on_device import on
from attn_compiler.lowerings.shared.launching.replaying import CallCache, call_cache
from attn_compiler.lowerings.shared.ops.leaf_ops import empty_gradient

#: names of a backward's inputs, before those of the operands
_INPUTS = ("GradOut", "GradLse", "Q", "K", "V", "Out", "Lse")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardByKernels(BackwardBody):
    """A backward by our kernels.

    operands: names of those that the op takes, in order.
    rows_together: row stats come in multiples of so many rows, which every kernel's block of queries divides.
    start: launches a kernel (shared.launching.launch.launch).
    make_room: allocates the kernels' outputs besides the row stats and the gradients of q, k and v.
    run: launches the kernels, and returns the gradients of the operands that have one, in the plan's order.
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

    def first(self, given: BackwardArguments, same: CallCache) -> Gradients:
        """Return the gradients of q, k, v and of the plan's differentiable operands, as `ops.BACKWARD_SCHEMA` says."""
        with on(given.q.device):
            shared = self.begin(*given)
            further = self.run(shared)
            if shared.prepared.call.spec.mask.means:
                from attn_compiler.lowerings.shared.calls import keyless_launch

                keyless_launch.add_gradients(shared)
            self._keep(shared)
        grads = shared.tensors
        return grads["GradQ"], grads["GradK"], grads["GradV"], further

    def begin(self, *arguments: Any) -> Backward:
        """Prepare one call, and allocate all outputs of its kernels. Tensors that they can't read are copied.

        arguments: as in BackwardArguments.
        """
        given = BackwardArguments(*arguments)
        q, k, v, grad_out, grad_lse, lse = given.q, given.k, given.v, given.grad_out, given.grad_lse, given.lse
        prepared = prepare(given.text)
        same = call_cache(self.op, given.text, backward_inputs(given))
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
        """Replay further calls like this one, if nothing was copied."""
        if shared.same.facts["copies"]:
            return
        of_operands = [f"Grad{name.capitalize()}" for name in shared.prepared.plan.differentiable]
        shared.same.keep(
            shared.ran,
            inputs=(*_INPUTS, *self.operands(shared.prepared)),
            returned=("GradQ", "GradK", "GradV", of_operands),
        )


def _empty_row_stats(lse: torch.Tensor, together: int) -> torch.Tensor:
    """Allocate row stats, (B, Hq, 2, rows), in whole blocks. There is always one, so that the first kernel has a program without queries,
    too."""
    batch, heads, seqlen_q = lse.shape
    rows = max(triton.cdiv(seqlen_q, together), 1) * together
    return torch.empty((batch, heads, 2, rows), dtype=torch.float32, device=lse.device)
