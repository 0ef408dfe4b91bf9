"""How exact a number is: the rounding of each dtype, the dtype of an exact run, differences, and noise as large as a rounding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attn_compiler.dtypes import HALVES

#: Rounding of a result, in units of the last place. CPU flash takes exp from a polynomial that is good to 20 of 24 bits.
FLOOR_ULPS = {torch.float64: 64.0, torch.float32: 16.0} | dict.fromkeys(HALVES, 2.0)
#: runs with noise before a difference is taken to be one
NOISY_RUNS = 4


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Numbers between -1 and 1, the same ones for the same seed."""

    seed: int
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        drawn = torch.rand(x.shape, generator=self._generators[x.device], device=x.device, dtype=x.dtype)
        return drawn * 2 - 1

    def on(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor as another rounding to the dtype might have made it."""
        return x * (1 + FLOOR_ULPS[dtype] * torch.finfo(dtype).eps * self.like(x))


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else torch.float64


def difference(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """|x - exact|; infinite where one of them is not finite and the other is something else."""
    x = x.to(exact.dtype)
    same = (x == exact) | (x.isnan() & exact.isnan())
    return torch.where(same, 0.0, (x - exact).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))


def largest(x: torch.Tensor, counts: torch.Tensor) -> float:
    """The largest magnitude among the elements that count."""
    return float(torch.where(counts, x, 0.0).abs().nan_to_num(nan=0.0).max()) if x.numel() else 0.0
