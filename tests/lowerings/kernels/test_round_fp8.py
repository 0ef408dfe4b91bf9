"""Compiled for Hopper, the kernels that round read whole vectors and keep all in registers. What they compute: ../test_fp8_rounding.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.lowerings.kernels import compiling_round_fp8
from tests.lowerings.kernels.compilers import of_a_known_compiler, printed_by
from tests.lowerings.kernels.compiling_round_fp8 import HEAD_DIMS, Found

#: bytes of a thread: some words where head dims up to 64 have half as many registers
SPILLED = 32


@pytest.fixture(scope="module")
def compiled() -> dict[str, Found]:
    return {each["name"]: Found(**each) for each in printed_by(compiling_round_fp8)}


@of_a_known_compiler
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_numbers_travel_in_vectors_and_stay_in_registers(head_dim: int, compiled: dict[str, Found]) -> None:
    rounding, looking = compiled[f"round {head_dim}"], compiled[f"look {head_dim}"]
    assert max(rounding.spilled, looking.spilled) <= SPILLED
    assert (rounding.loads, rounding.stores, looking.loads) == (".v4", ".v4", ".v4")
