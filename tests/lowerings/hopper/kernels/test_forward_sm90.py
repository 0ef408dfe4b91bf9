"""Compiled for Hopper, the kernel keeps what it computes in registers, and waits for its products no more often than it is written."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.lowerings.hopper.kernels import compiling
from tests.lowerings.hopper.kernels.compiling import CASES, Found
from tests.lowerings.kernel_cases import Case
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by
from tests.thinned import asked_for, in_full

SHARED = 227 * 1024
#: bytes of a thread: of what a block keeps beside its tiles
SPILLED = 48
#: of each warpgroup that computes: the scores of the first tile; of each of two loops scores and outputs; the last outputs
WAITS = 6
_CONSUMERS = 2
#: of what the rows of a mask that is all of several parts are computed again with, once in a while
_SPILLED_AGAIN = 512

#: Each part of a mask, each change of the scores, each pair of head dims.
_DAILY = ("causal_64", "keys_64", "documents_128", "rows_128", "slopes_128", "causal_192_128", "softcap_256")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[tuple[str, str], Found]:
    names = [case.name for case in asked_for(request, "case")]
    return {(each["name"], each["kernel"]): Found(**each) for each in printed_by(compiling, *names)}


@of_a_known_compiler
@pytest.mark.parametrize("case", in_full(CASES, daily=lambda case: case.name in _DAILY), ids=lambda case: case.name)
def test_little_is_spilled_and_products_do_not_wait_for_each_other(
    case: Case, compiled: dict[tuple[str, str], Found]
) -> None:
    found = compiled[case.name, "attention_forward_sm90"]
    assert found.shared <= SHARED
    assert found.spilled <= SPILLED
    # ptxas waits after every product where it can't tell their registers apart.
    assert found.waits == WAITS * _CONSUMERS < found.products
    assert not found.unset
    again = compiled.get((case.name, "attention_again"))
    assert again is None or again.spilled <= _SPILLED_AGAIN
