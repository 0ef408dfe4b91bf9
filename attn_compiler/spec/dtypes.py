"""The dtypes of attention. A new half-precision dtype is a word in HALF, and in the list of each family.

Specs and families name a dtype as text ("bfloat16"); code that reads tensors has the same lists as torch's dtypes.
"""

from __future__ import annotations

import torch

#: two bytes wide. Kernels compute such a site in float32.
HALF = ("bfloat16", "float16")
#: dtypes that kernels compute in unchanged
FULL = ("float32", "float64")
#: all dtypes that a model may compute in
ALL = (*HALF, *FULL)

HALVES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in HALF)
EVERY: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in ALL)
#: name -> bytes of an element
BYTES = {name: dtype.itemsize for name, dtype in zip(ALL, EVERY, strict=True)}


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, weights and sums at such a site: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
