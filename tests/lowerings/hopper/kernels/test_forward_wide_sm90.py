"""Compiled for Hopper, the kernel for wide heads keeps what it computes in registers, and waits for its products where it is written."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.lowerings.hopper.kernels import compiling
from tests.lowerings.hopper.kernels.compiling import WIDE, Found
from tests.lowerings.kernel_cases import Case
from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.thinned import asked_for, in_full

SHARED = 227 * 1024
#: bytes of a thread, most of which the warpgroup that fetches has, and one in front of its loops; what was measured had 256
SPILLED = 256
_CONSUMERS, _STEP, _PASS = 2, 16, 256
#: tiles of scores and of outputs that the code of a warpgroup has: the first one or the last one, and those of two loops
_TILES = 3

_DAILY = ("wide_512_causal", "wide_512_keys")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Found]:
    names = [case.name for case in asked_for(request, "case")]
    found = (Found(**each) for each in printed_by(compiling, *names))
    return {each.name: each for each in found if each.kernel == "attention_forward_wide_sm90"}


@of_a_known_compiler
@pytest.mark.parametrize("case", in_full(WIDE, daily=lambda case: case.name in _DAILY), ids=lambda case: case.name)
def test_little_is_spilled_and_products_do_not_wait_for_each_other(case: Case, compiled: dict[str, Found]) -> None:
    found = compiled[case.name]
    assert found.shared <= SHARED
    assert found.spilled <= most_spilled(SPILLED, f"hopper {case.name}")
    part = _PASS if case.head_dim % _PASS == 0 else _PASS // 2
    of_scores, of_outputs = case.head_dim // part, _PASS // part
    # One for each part of a tile: what it was multiplied from is let go of.
    assert found.waits == (of_scores + of_outputs) * _TILES * _CONSUMERS
    assert found.columns == {
        "64": case.head_dim // _STEP * _TILES * _CONSUMERS,
        f"{part}": of_outputs * (64 // _STEP) * _TILES * _CONSUMERS,
    }
    assert not found.unset
