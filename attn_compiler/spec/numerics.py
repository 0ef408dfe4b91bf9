"""The numeric rule, FlashAttention's: a result may have twice the error of the same math in its own dtype.

max|x - exact| <= factor · max|plain - exact| + floor        factor 2, with a softcap 3; gradients the same

exact: the math in a wider dtype. plain: the same math, every step in the dtype of the inputs. floor: the rounding of the result itself, for
shapes whose plain math happens to be exact. `verify`, `compare`, tests and benchmarks read the rule here.
"""

from __future__ import annotations

import torch

from attn_compiler.spec.dtypes import HALVES

#: factors of the rule, without and with a softcap
FACTOR, FACTOR_SOFTCAP = 2.0, 3.0
#: Rounding of a result, in units of the last place. CPU flash takes exp from a polynomial that is good to 20 of 24 bits.
FLOOR_ULPS = {torch.float64: 64.0, torch.float32: 16.0} | dict.fromkeys(HALVES, 2.0)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an exact run."""
    return torch.float32 if dtype in HALVES else torch.float64


def difference(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return |x - exact|; infinite if one of them is not finite and the other differs."""
    x = x.to(exact.dtype)
    same = (x == exact) | (x.isnan() & exact.isnan())
    return torch.where(same, 0.0, (x - exact).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))


def largest(x: torch.Tensor, counts: torch.Tensor) -> float:
    """Return the largest magnitude among the elements that count."""
    return float(torch.where(counts, x, 0.0).abs().nan_to_num(nan=0.0).max()) if x.numel() else 0.0
