"""Compiled for Hopper, the backwards spill little, and multiply and wait no more often than they are written."""

from __future__ import annotations

import pytest

from attn_compiler.lowerings.hopper import plan
from tests.lowerings.hopper.kernels import compiling_backward
from tests.lowerings.hopper.kernels.compiling import Found
from tests.lowerings.hopper.kernels.compiling_backward import ADDED, CASES, IN_ORDER, WIDE
from tests.lowerings.kernel_cases import Case
from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.thinned import asked_for, in_full

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

SHARED = 227 * 1024
#: bytes of a thread, by head dim. The sums of dk and dv take 128 registers of 128, and what is added to dq and scores up to 64 more.
SPILLED = {64: 96, 128: 256}
#: and where blocks take turns, which takes registers of the warpgroup that fetches
SPILLED_IN_ORDER = {64: 96, 128: 352}
#: by products of both warpgroups in one loop, their waits for them in it: 80 with two halves, 48 beside more than a band of narrow heads
WAITS = {80: 8, 64: 6, 48: 6}

#: Each part of a mask, each change of the scores, each head dim.
_DAILY = (
    "grad_causal_64",
    "grad_keys_64",
    "grad_documents_128",
    "grad_rows_128",
    "grad_softcap_128",
    "grad_slopes_128",
    "grad_mask_128",
    "grad_bias_128",
    "in_order_grad_causal_64",
    "in_order_grad_causal_128",
    "in_order_grad_keys_128",
)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Found]:
    names = [case.name for case in asked_for(request, "case")]
    return {each["name"]: Found(**each) for each in printed_by(compiling_backward, *names)}


@pytest.mark.in_turns(3)
@of_a_known_compiler
@pytest.mark.parametrize(
    "case", in_full((*CASES, *ADDED, *IN_ORDER), daily=lambda case: case.name in _DAILY), ids=lambda case: case.name
)
def test_little_is_spilled_and_products_do_not_wait_for_each_other(case: Case, compiled: dict[str, Found]) -> None:
    found = compiled[case.name]
    assert found.kernel == "attention_backward_sm90"
    assert found.shared <= SHARED
    in_order = case in IN_ORDER
    usual = (SPILLED_IN_ORDER if in_order else SPILLED)[case.head_dim]
    assert found.spilled <= most_spilled(usual, f"hopper {case.name}")
    # ptxas waits after every product where registers do not suffice, or where it can't tell them apart.
    # Where blocks take turns and some tiles on both sides need their mask, all are masked, in one loop.
    beside = any((case.bias, case.documents and case.band, case.mask, case.slopes))
    products = 64 if case.head_dim == 128 else 48 if beside else 80
    loops = 1 if in_order and found.products < 2 * products else 2
    assert (found.products, found.waits) == (loops * products, loops * WAITS[products])


@pytest.mark.parametrize(
    "case",
    in_full([case for case in ADDED if case.bias], daily=lambda case: case.name in _DAILY),
    ids=lambda case: case.name,
)
def test_a_tile_has_been_read_where_it_is_let_go_of(case: Case, compiled: dict[str, Found]) -> None:
    """By each of two warpgroups, in each of two loops."""
    found = compiled[case.name]
    assert found.read >= 4
    assert found.under_way == [0] * 4


#: bytes of a thread, most of which the warpgroup that fetches has
WIDE_SPILLED = {"q": 200, "k": 288, "v": 160}
_STEP = 16
_WIDE_DAILY = ("grad_wide_512_causal", "grad_wide_512_keys")


@pytest.fixture(scope="module")
def compiled_wide(request: pytest.FixtureRequest) -> dict[str, list[Found]]:
    found: dict[str, list[Found]] = {}
    for each in printed_by(compiling_backward, *(case.name for case in asked_for(request, "case"))):
        if "wide" in each["kernel"]:
            found.setdefault(each["name"], []).append(Found(**each))
    return found


@of_a_known_compiler
@pytest.mark.parametrize("case", in_full(WIDE, daily=lambda case: case.name in _WIDE_DAILY), ids=lambda case: case.name)
def test_each_pass_spills_little(case: Case, compiled_wide: dict[str, list[Found]]) -> None:
    passes = {each.kernel.removeprefix("attention_grad_"): each for each in compiled_wide[case.name]}
    assert set(passes) == {"wide_sm90 q", "wide_sm90 k", "v_wide_sm90 v"}
    for name, found in passes.items():
        grad = name[-1]
        assert found.shared <= SHARED
        assert found.spilled <= most_spilled(WIDE_SPILLED[grad], f"hopper {case.name} {grad}")
        assert not found.unset


@of_a_known_compiler
@pytest.mark.parametrize("case", in_full(WIDE, daily=lambda case: case.name in _WIDE_DAILY), ids=lambda case: case.name)
def test_dq_and_dk_have_no_product_twice(case: Case, compiled_wide: dict[str, list[Found]]) -> None:
    """Scores and sums are in two loops, one of them without a mask. The weights' gradients come before a loop and in it, their sums in it
    and after it."""
    parts = -(-case.head_dim // plan.WIDE_PART)
    for found in compiled_wide[case.name]:
        if found.kernel.startswith("attention_grad_v"):
            continue
        tile = 32 if case.head_dim == 512 and case.band and not (case.keys or case.documents) else 64
        both = -(-case.head_dim // plan.WIDE_PART_V) * plan.WIDE_PART_V + parts * plan.WIDE_PART
        assert found.columns == {f"{tile}": 2 * both // _STEP, f"{plan.WIDE_PART}": 2 * parts * (tile // _STEP)}


# Compiled for Hopper, the pass for dv of wide heads multiplies scores and sums alone.
_NAME = "grad_wide_512_causal"
_DIM, _TILE, _VALUES_STEP = 512, 64, 16


@of_a_known_compiler
def test_the_pass_for_dv_has_scores_and_sums_alone() -> None:
    assert _NAME in {case.name for case in WIDE}
    found = [Found(**each) for each in printed_by(compiling_backward, _NAME)]
    (values,) = [each for each in found if each.kernel.startswith("attention_grad_v")]
    # Of each half of v's dims: a first tile, and a loop with a mask and one without.
    loops = 2 * 3
    assert values.columns == {f"{_TILE}": loops * _DIM // _VALUES_STEP, f"{_DIM // 2}": loops * _TILE // _VALUES_STEP}
    assert values.shared <= SHARED
    assert not values.unset
