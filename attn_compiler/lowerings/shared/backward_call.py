"""What our kernels' backwards share on tensors: what is allocated, what each kernel is launched with, what is replayed. As forward_call.py.

Imports triton, so it comes late.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import triton

from attn_compiler.lowerings.shared.arguments import (
    Prepared,
    Tensors,
    alignment,
    common,
    operand_parameters,
    prepare,
    strides,
)
from attn_compiler.lowerings.shared.launching import Alike, Arguments, Ready, Site, alike
from attn_compiler.lowerings.shared.on_device import on
from attn_compiler.lowerings.shared.ops import empty_gradient
from attn_compiler.lowerings.shared.readable import is_unreadable, readable

#: what `ops.BACKWARD_SCHEMA` returns
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]

#: of every backward, before its operands
_INPUTS = ("Q", "K", "V", "GradOut", "GradLse", "Out", "Lse")


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
    start: Callable[..., Ready | None]
    ran: list[Ready | None] = field(default_factory=list)

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


def _inputs(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    operands: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """In the order of `_INPUTS` and then the operands."""
    return (q, k, v, grad_out, grad_lse, out, lse, *operands)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """op: the leaf op's name.
    operands: names of those that the op takes, in order.
    rows_together: row stats come in multiples of so many rows, which every kernel's block of queries divides.
    start: launches a kernel (shared.launching.launch).
    make_room: allocates what the kernels write besides the row stats and the gradients of q, k and v.
    run: launches the kernels, and gives the gradients of the operands that have one, in the plan's order.
    """

    op: str
    operands: Callable[[Prepared], tuple[str, ...]]
    rows_together: Callable[[Prepared], int]
    start: Callable[..., Ready | None]
    make_room: Callable[[Backward], None]
    run: Callable[[Backward], list[torch.Tensor]]

    def __call__(
        self,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        operands: Tensors,
        out: torch.Tensor,
        lse: torch.Tensor,
        text: str,
    ) -> Found:
        """Gradients of q, k, v and of the plan's differentiable operands, as `ops.BACKWARD_SCHEMA` says."""
        inputs = _inputs(grad_out, grad_lse, q, k, v, operands, out, lse)
        same = alike(self.op, text, inputs)
        if same.replay is not None:
            return _as_schema(same.replay.run(inputs))
        with on(q.device):
            shared = self.begin(grad_out, grad_lse, q, k, v, operands, out, lse, text)
            further = self.run(shared)
            self._keep(shared)
        return _as_schema([*(shared.tensors[f"Grad{name}"] for name in "QKV"), *further])

    def begin(
        self,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        operands: Tensors,
        out: torch.Tensor,
        lse: torch.Tensor,
        text: str,
    ) -> Backward:
        """One call, with room for all that its kernels write. Tensors that they can't read are copied."""
        prepared = prepare(text)
        same = alike(self.op, text, _inputs(grad_out, grad_lse, q, k, v, operands, out, lse))
        same.any_size = prepared.any_size
        if same.fact("unreadable", lambda: is_unreadable(q, k, v, grad_out)):
            q, k, v, grad_out = map(readable, (q, k, v, grad_out))
            return self.begin(grad_out, grad_lse, q, k, v, operands, out, lse, text)
        same.fact("copies", lambda: not grad_lse.is_contiguous())
        names = (*_INPUTS, *self.operands(prepared))
        inputs = _inputs(grad_out, grad_lse.contiguous(), q, k, v, operands, out, lse)
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
        of_operands = (f"Grad{name.capitalize()}" for name in shared.prepared.plan.differentiable)
        shared.same.keep(
            shared.ran,
            inputs=(*_INPUTS, *self.operands(shared.prepared)),
            returned=("GradQ", "GradK", "GradV", *of_operands),
        )


def _as_schema(grads: Sequence[torch.Tensor]) -> Found:
    return grads[0], grads[1], grads[2], list(grads[3:])


def _empty_row_stats(lse: torch.Tensor, together: int) -> torch.Tensor:
    """(B, Hq, 2, rows), whole blocks. One at least: without queries, too, the kernel that comes first has something to start for."""
    batch, heads, seqlen_q = lse.shape
    rows = max(triton.cdiv(seqlen_q, together), 1) * together
    return torch.empty((batch, heads, 2, rows), dtype=torch.float32, device=lse.device)


class BackwardSite(Site):
    """A backward for one place in compiled code."""

    __slots__ = ()
    gradients: ClassVar[Gradients]

    def __call__(
        self,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        operands: Tensors,
        out: torch.Tensor,
        lse: torch.Tensor,
        text: str,
    ) -> Found:
        inputs = _inputs(grad_out, grad_lse, q, k, v, operands, out, lse)
        found = self.again(inputs)
        if found is None:
            grads = self.gradients(grad_out, grad_lse, q, k, v, operands, out, lse, text)
            self.learn(self.gradients.op, text, inputs)
            return grads
        return found[0], found[1], found[2], found[3:]
