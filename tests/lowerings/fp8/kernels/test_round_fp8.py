"""Compiled for Hopper, the kernels that round read whole vectors and keep all in registers. What they compute: ../test_fp8_rounding.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.lowerings.fp8.kernels import compiling_round
from tests.lowerings.fp8.kernels.compiling_round import HEAD_DIMS, Found
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by

#: bytes of a thread, of head dims up to 128: some words where registers are few
SPILLED = {"plain": 32, "accurate": 64, "accurate, shift": 96, "plain, seen": 32, "accurate, seen": 64}
#: of a program, so that two share a multiprocessor, each with 1 KB of its own
SHARED = 228 * 1024 // 2 - 1024


@pytest.fixture(scope="module")
def compiled() -> dict[str, Found]:
    return {each["name"]: Found(**each) for each in printed_by(compiling_round)}


@pytest.mark.in_turns
@of_a_known_compiler
@pytest.mark.parametrize("kind", ["plain", "plain, seen"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_numbers_travel_in_vectors_and_stay_in_registers(head_dim: int, kind: str, compiled: dict[str, Found]) -> None:
    rounding, looking = compiled[f"round {kind} {head_dim}"], compiled[f"look {kind} {head_dim}"]
    assert max(rounding.spilled, looking.spilled) <= SPILLED[kind]
    assert (rounding.loads, rounding.stores, looking.loads) == (".v4", ".v4", ".v4")


@of_a_known_compiler
@pytest.mark.parametrize("kind", ["accurate", "accurate, shift", "accurate, seen"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotations_are_the_tensor_cores_and_stay_in_registers(
    head_dim: int, kind: str, compiled: dict[str, Found]
) -> None:
    rounding, looking = compiled[f"round {kind} {head_dim}"], compiled[f"look {kind} {head_dim}"]
    assert rounding.spilled <= SPILLED[kind]
    assert looking.spilled == 0
    assert (rounding.loads, rounding.stores, looking.loads) == (".v4", ".v4", ".v4")
    assert min(rounding.on_tensor_cores, looking.on_tensor_cores) > 0
    assert rounding.shared <= SHARED


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_register_of_fp8_is_packed_and_taken_apart(head_dim: int, compiled: dict[str, Found]) -> None:
    """ptxas 12.8 takes such a register apart before it has packed it, in loops the one of the turn before: on a GPU what came of it was
    wrong, and in an interpreter right."""
    assert compiled[f"round shift {head_dim}"].repacked == 0


@of_a_known_compiler
def test_the_widest_fit_shared_memory_of_other_gpus_too(compiled: dict[str, Found]) -> None:
    """100 KB, of sm89 and sm120."""
    names = ("round accurate, shift 256", "look accurate, shift 256")
    assert max(compiled[name].shared for name in names) <= 99 * 1024


@of_a_known_compiler
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sums_are_read_in_vectors(head_dim: int, compiled: dict[str, Found]) -> None:
    assert compiled[f"sums {head_dim}"].loads == ".v4"
    assert max(compiled[f"{name} {head_dim}"].spilled for name in ("sums", "mean")) == 0
