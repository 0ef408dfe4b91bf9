"""What a graph gives at padding, which counts for nothing once padding is left out: it is 0 on both sides when results are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """before: gives from the graph's inputs which tokens it computes, (B, S). places: of each output with padding the axes of rows and
    positions, or twice the one that holds both."""

    before: fx.GraphModule
    places: Mapping[int, tuple[int, int]]

    def cleared(self, found: Mapping[int, Any], inputs: Sequence[Any]) -> dict[int, Any]:
        """Tensors by the place of the output that they belong to, with 0 at padding."""
        with torch.no_grad():
            real = self.before(*inputs)[0]
        return {
            i: _cleared(x, real, self.places[i]) if i in self.places and isinstance(x, torch.Tensor) else x
            for i, x in found.items()
        }


def _cleared(x: torch.Tensor, real: torch.Tensor, places: tuple[int, int]) -> torch.Tensor:
    rows, positions = places
    shape = [1] * x.dim()
    shape[rows] = real.shape[0]
    shape[positions] = real.shape[1]
    if rows == positions:
        shape[rows] = real.numel()
    elif rows > positions:
        real = real.t()
    return torch.where(real.reshape(shape), x, torch.zeros((), dtype=x.dtype, device=x.device))
