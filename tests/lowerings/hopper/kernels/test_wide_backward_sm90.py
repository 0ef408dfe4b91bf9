"""Compiled for Hopper, the passes of wide heads' backward spill little, and multiply and wait no more often than they are written."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper import plan
from tests.lowerings.hopper.kernels import compiling_backward
from tests.lowerings.hopper.kernels.compiling import Found
from tests.lowerings.hopper.kernels.compiling_backward import WIDE
from tests.lowerings.kernel_cases import Case
from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.thinned import asked_for, in_full

SHARED = 227 * 1024
#: bytes of a thread, most of which the warpgroup that fetches has
SPILLED = {"q": 200, "k": 288, "v": 160}
_STEP = 16
_DAILY = ("grad_wide_512_causal", "grad_wide_512_keys")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, list[Found]]:
    found: dict[str, list[Found]] = {}
    for each in printed_by(compiling_backward, *(case.name for case in asked_for(request, "case"))):
        if "wide" in each["kernel"]:
            found.setdefault(each["name"], []).append(Found(**each))
    return found


@of_a_known_compiler
@pytest.mark.parametrize("case", in_full(WIDE, daily=lambda case: case.name in _DAILY), ids=lambda case: case.name)
def test_each_pass_spills_little(case: Case, compiled: dict[str, list[Found]]) -> None:
    passes = {each.kernel.removeprefix("attention_grad_"): each for each in compiled[case.name]}
    assert set(passes) == {"wide_sm90 q", "wide_sm90 k", "v_wide_sm90 v"}
    for name, found in passes.items():
        grad = name[-1]
        assert found.shared <= SHARED
        assert found.spilled <= most_spilled(SPILLED[grad], f"hopper {case.name} {grad}")
        assert not found.unset


@of_a_known_compiler
@pytest.mark.parametrize("case", in_full(WIDE, daily=lambda case: case.name in _DAILY), ids=lambda case: case.name)
def test_dq_and_dk_have_no_product_twice(case: Case, compiled: dict[str, list[Found]]) -> None:
    """Scores and sums are in two loops, one of them without a mask. The weights' gradients come before a loop and in it, their sums in it
    and after it."""
    parts = -(-case.head_dim // plan.WIDE_PART)
    for found in compiled[case.name]:
        if found.kernel.startswith("attention_grad_v"):
            continue
        tile = 32 if case.head_dim == 512 and case.band and not (case.keys or case.documents) else 64
        both = -(-case.head_dim // plan.WIDE_PART_V) * plan.WIDE_PART_V + parts * plan.WIDE_PART
        assert found.columns == {f"{tile}": 2 * both // _STEP, f"{plan.WIDE_PART}": 2 * parts * (tile // _STEP)}
