"""The dtypes that attention is computed in. A new one in half precision is a word in HALF, and in what each family takes.

A spec, and what a family takes, hold a dtype by its name ("bfloat16"); what reads tensors has the same lists as torch's dtypes.
"""

from __future__ import annotations

import torch

#: of two bytes. Kernels compute such a site in float32.
HALF = ("bfloat16", "float16")
#: which kernels compute in as they are
FULL = ("float32", "float64")
#: of all that a model may compute in
ALL = (*HALF, *FULL)

HALVES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in HALF)
EVERY: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in ALL)
#: name -> bytes of an element
BYTES = {name: dtype.itemsize for name, dtype in zip(ALL, EVERY, strict=True)}


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, weights and sums at such a site: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
