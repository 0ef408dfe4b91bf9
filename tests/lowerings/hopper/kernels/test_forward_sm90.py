"""Compiled for Hopper, the kernel keeps what it computes in registers, and waits for its products no more often than it is written."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.lowerings.hopper.kernels import compiling
from tests.lowerings.hopper.kernels.compiling import ADDED, CASES, SUMMED, Found
from tests.lowerings.kernel_cases import Case
from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.thinned import asked_for, in_full

SHARED = 227 * 1024
#: bytes of a thread: of what a block keeps beside its tiles
SPILLED = 48
#: of each warpgroup that computes: the scores of the first tile; of each of two loops scores and outputs; the last outputs
WAITS = 6
_CONSUMERS = 2
#: of what the rows of a mask that is all of several parts are computed again with, once in a while; the Triton family's, whose products
#: of 96 dims are two as well, and which reads dense masks as they are
_SPILLED_AGAIN, _SPILLED_AGAIN_BY_TWO = 512, 1024

#: Each part of a mask, each change of the scores, each pair of head dims.
_DAILY = (
    *("causal_64", "keys_64", "documents_128", "rows_128", "slopes_128", "causal_192_128", "softcap_256"),
    *("summed_80", "summed_96_window", "summed_112_keys"),
    *("bias_64_keys", "bias_128", "distances_128", "mask_128", "mask_bias_128"),
)
#: of summed head dims: what the tensor cores multiply along an axis at once, keys of a tile, and tiles that the code has
_STEP, _KEYS, _SCORES, _OUTPUTS = 16, 128, 3, 3


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[tuple[str, str], Found]:
    names = [case.name for case in asked_for(request, "case")]
    return {(each["name"], each["kernel"]): Found(**each) for each in printed_by(compiling, *names)}


@pytest.mark.in_turns(3)
@of_a_known_compiler
@pytest.mark.parametrize(
    "case", in_full((*CASES, *SUMMED, *ADDED), daily=lambda case: case.name in _DAILY), ids=lambda case: case.name
)
def test_little_is_spilled_and_products_do_not_wait_for_each_other(
    case: Case, compiled: dict[tuple[str, str], Found]
) -> None:
    found = compiled[case.name, "attention_forward_sm90"]
    assert found.shared <= SHARED
    assert found.spilled <= most_spilled(SPILLED, f"hopper {case.name}")
    # ptxas waits after every product where it can't tell their registers apart.
    assert found.waits == WAITS * _CONSUMERS < found.products
    assert not found.unset
    again = compiled.get((case.name, "attention_again"))
    most = _SPILLED_AGAIN_BY_TWO if case in (*SUMMED, *ADDED) else _SPILLED_AGAIN
    assert again is None or again.spilled <= most_spilled(most, f"hopper {case.name}, again")


@pytest.mark.parametrize(
    "case",
    in_full([case for case in ADDED if case.bias or case.distances], daily=lambda case: case.name in _DAILY),
    ids=lambda case: case.name,
)
def test_a_tile_has_been_read_where_it_is_let_go_of(case: Case, compiled: dict[tuple[str, str], Found]) -> None:
    """By each warpgroup, of the first tile and in each loop."""
    found = compiled[case.name, "attention_forward_sm90"]
    assert found.read >= _CONSUMERS * _SCORES
    assert found.under_way == [0] * _CONSUMERS * _SCORES


_OWN_SIZE = [case for case in SUMMED if max(case.head_dim, case.head_dim_v or 0) <= _KEYS]


@of_a_known_compiler
@pytest.mark.parametrize(
    "case",
    in_full([case for case in ADDED if case.bias], daily=lambda case: case.name in _DAILY),
    ids=lambda case: case.name,
)
def test_tiles_of_a_bias_are_read_as_matrices(case: Case, compiled: dict[tuple[str, str], Found]) -> None:
    """Of the first tile and of each loop, by each warpgroup: four of 8 x 8 at once."""
    keys = _KEYS if case.head_dim <= _KEYS else _KEYS // 2
    assert compiled[case.name, "attention_forward_sm90"].matrices == _CONSUMERS * _SCORES * keys // 16


@of_a_known_compiler
@pytest.mark.parametrize("case", in_full(_OWN_SIZE, daily=lambda case: case.name in _DAILY), ids=lambda case: case.name)
def test_products_are_no_wider_than_the_sum(case: Case, compiled: dict[tuple[str, str], Found]) -> None:
    """Scores have a product for every 16 dims, and outputs one for every 16 keys and part."""
    parts = [width for width in (64, 32, 16) if case.head_dim & width]
    scores = {str(_KEYS): _CONSUMERS * _SCORES * case.head_dim // _STEP}
    outputs = {str(width): _CONSUMERS * _OUTPUTS * _KEYS // _STEP for width in parts}
    assert compiled[case.name, "attention_forward_sm90"].columns == scores | outputs
