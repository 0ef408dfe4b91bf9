"""As compiling.py, of backwards: python -m tests.lowerings.hopper.kernels.compiling_backward"""

from __future__ import annotations

import dataclasses

from attn_compiler.lowerings.hopper.plan import GRAD_BLOCKS
from tests.lowerings.hopper.kernels import compiling
from tests.lowerings.triton.kernels.compiling import say

CASES = tuple(
    dataclasses.replace(case, name=f"grad_{case.name}", needs_grad=True)
    for case in (*compiling.CASES, *compiling.SUMMED)
    if max(case.head_dim, case.head_dim_v or 0) <= max(GRAD_BLOCKS)
)
#: with a dense mask, or a bias that wants no gradient
ADDED = tuple(
    dataclasses.replace(case, name=f"grad_{case.name}", needs_grad=True, bias_grad=False)
    for case in compiling.ADDED
    if not case.distances and case.head_dim <= max(GRAD_BLOCKS)
)

#: head dims above 256, of which each gradient has a pass of its own
WIDE = tuple(
    dataclasses.replace(case, name=f"grad_{case.name}", needs_grad=True) for case in compiling.WIDE if not case.mask
)

#: the same as they add up in one order
IN_ORDER = tuple(dataclasses.replace(case, name=f"in_order_{case.name}") for case in CASES)

if __name__ == "__main__":
    say(compiling.run, (*CASES, *ADDED, *WIDE, *IN_ORDER))
