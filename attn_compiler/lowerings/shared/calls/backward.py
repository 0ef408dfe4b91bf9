"""One call of a backward, which its kernels share. Imports triton, so this module is imported late."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_compiler.lowerings.shared.calls.arguments import Prepared, alignment, common, operand_parameters, strides
from attn_compiler.lowerings.shared.launching.launch import Arguments, ReadyKernel
from attn_compiler.lowerings.shared.launching.replaying import CallCache


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Data that the kernels of one backward share.

    tensors: Q, K, V, GradOut, GradLse, Out, Lse, RowStats and the operands by their names; each kernel adds its own outputs.
    start: launches a kernel (shared.launching.launch.launch).
    ran: the launches so far.
    """

    prepared: Prepared
    same: CallCache
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
        """Return whether the pass over the keys comes first, and stores the scores' gradients for the others."""
        return "Scores" in self.tensors

    def parameters(self, *outputs: str) -> dict[str, str | None]:
        names = {name: name for name in ("Q", "K", "V", "GradOut", "RowStats", *outputs)}
        return {**names, **operand_parameters(self.prepared)}

    @property
    def scores(self) -> dict[str, str | None]:
        """The parameter for stored scores."""
        return {"Scores": "Scores" if self.keeps_scores else None}

    @property
    def pitch(self) -> dict[str, int]:
        """Elements from one row of stored scores to the next."""
        return {"pitch": self.tensors["Scores"].stride(2) if self.keeps_scores else 0}

    def launch(self, kernel: Any, arguments: Callable[[Backward], Arguments], part: str = "") -> None:
        self.ran.append(self.start(kernel, self.same, self.tensors, functools.partial(arguments, self), part))
