"""Compiled for Hopper, the pass for dv of wide heads multiplies scores and sums alone."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.lowerings.hopper.kernels import compiling_backward
from tests.lowerings.hopper.kernels.compiling import Found
from tests.lowerings.hopper.kernels.compiling_backward import WIDE
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by

_NAME = "grad_wide_512_causal"
_DIM, _TILE, _STEP = 512, 64, 16
SHARED = 227 * 1024


@of_a_known_compiler
def test_the_pass_for_dv_has_scores_and_sums_alone() -> None:
    assert _NAME in {case.name for case in WIDE}
    found = [Found(**each) for each in printed_by(compiling_backward, _NAME)]
    (values,) = [each for each in found if each.kernel.startswith("attention_grad_v")]
    # Of each half of v's dims: a first tile, and a loop with a mask and one without.
    loops = 2 * 3
    assert values.columns == {f"{_TILE}": loops * _DIM // _STEP, f"{_DIM // 2}": loops * _TILE // _STEP}
    assert values.shared <= SHARED
    assert not values.unset
