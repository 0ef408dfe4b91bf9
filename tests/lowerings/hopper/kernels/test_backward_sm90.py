"""Compiled for Hopper, the backward spills little, and waits for its products no more often than it is written."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.lowerings.hopper.kernels import compiling_backward
from tests.lowerings.hopper.kernels.compiling import Found
from tests.lowerings.hopper.kernels.compiling_backward import ADDED, CASES, IN_ORDER
from tests.lowerings.kernel_cases import Case
from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.thinned import asked_for, in_full

SHARED = 227 * 1024
#: bytes of a thread, by head dim. The sums of dk and dv take 128 registers of 128, and what is added to dq and scores up to 64 more.
SPILLED = {64: 96, 128: 256}
#: and where blocks take turns, which takes registers of the warpgroup that fetches
SPILLED_IN_ORDER = {64: 96, 128: 352}
#: of each warpgroup that computes, in each of two loops: scores, gradients of weights, and all that comes of them
WAITS = 6
#: instructions of both warpgroups, in one loop
PRODUCTS = {64: 48, 128: 64}
_CONSUMERS = 2

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
    loops = 1 if in_order and found.products < 2 * PRODUCTS[case.head_dim] else 2
    assert found.waits == WAITS // 2 * loops * _CONSUMERS < found.products
    # `unset` says nothing here: ptxas moves descriptors to registers and back, where uniform ones do not suffice.


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
