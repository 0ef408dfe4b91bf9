"""A tensor in FP8 or int8 by ordinary nodes of the graph, where its largest magnitude is known beforehand: Inductor fuses the cast, and a
row's largest magnitude for the steps to come, into whatever made the tensor, so that it is never written in the model's dtype.

Where scales come from the tensor itself Inductor 2.11 does not: of rotary embedding, magnitudes of blocks and cast it makes three kernels,
each with a pass of its own over memory. There, and where positions have to be last, an op rounds (fp8_rounding.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from attn_compiler.lowerings.base import Emitter
from attn_compiler.lowerings.fp8_rounding import How, Per


@dataclass(frozen=True, kw_only=True)
class ByNodes:
    """x8: as x lies. descale: as its `largest`. newest: float32 (n,), the largest finite magnitudes; None if they are not asked for."""

    x8: fx.Node
    descale: fx.Node
    newest: fx.Node | None


def rounded(emitter: Emitter, x: fx.Node, largest: fx.Node, how: How, per: Per | None) -> ByNodes:
    """As fp8_rounding.round_fp8 does it. x: (B, H, S, D), without a gradient. largest: float32 (1, H|1, 1). per: of what is newest."""
    return _Nodes(emitter).rounded(x, largest, how, per)


@dataclass(frozen=True)
class _Nodes:
    emitter: Emitter

    def rounded(self, x: fx.Node, largest: fx.Node, how: How, per: Per | None) -> ByNodes:
        wide = self._call(torch.Tensor.to, x, torch.float32)
        finite = self._call(torch.isfinite, wide)
        scale = self._scale(largest, how)
        scaled = self._call(torch.mul, wide, self._call(torch.unsqueeze, scale, 3))
        inside = self._call(torch.clamp, scaled, -how.largest, how.largest)
        # Clamping alone would make a number of what is infinite.
        kept = self._call(torch.where, finite, inside, 0.0 if how.dtype == torch.int8 else float("nan"))
        whole = self._call(torch.round, kept) if how.dtype == torch.int8 else kept
        return ByNodes(
            x8=self._call(torch.Tensor.to, whole, how.dtype),
            descale=self._call(torch.reciprocal, scale),
            newest=None if per is None else self._newest(wide, finite, per),
        )

    def _scale(self, largest: fx.Node, how: How) -> fx.Node:
        scale = self._call(torch.div, how.fits, largest)
        # 0, or so small that the quotient overflows: any scale does.
        fits = self._call(torch.logical_and, self._call(torch.gt, largest, 0.0), self._call(torch.isfinite, scale))
        return self._call(torch.where, fits, scale, 1.0)

    def _newest(self, wide: fx.Node, finite: fx.Node, per: Per) -> fx.Node:
        """First of each row, which stays within the kernel that makes it, then of those."""
        size = self._call(torch.where, finite, self._call(torch.abs, wide), 0.0)
        rows = self._call(torch.amax, size, 3)
        dims = {"tensor": (0, 1, 2), "head": (0, 2), "row": (2,)}[per]
        return self._call(torch.reshape, self._call(torch.amax, rows, dims), (-1,))

    def _call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        return self.emitter.call(function, *args)
