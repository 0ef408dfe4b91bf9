"""Compiled for several GPUs, the Triton family's kernels fit and spill little."""

from __future__ import annotations

import pytest

from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.lowerings.triton.kernels import compiling
from tests.lowerings.triton.kernels.compiling import (
    ADDED,
    CASES,
    JOBS,
    KERNELS,
    MACHINES,
    WIDE_KERNELS,
    WIDE_MACHINES,
    Found,
    name_of,
)
from tests.thinned import asked_for, in_full

pytest.importorskip("triton")

# Compiled for four families of GPUs with the table's tiles, kernels use the tensor cores.

#: bytes that a block may have, of Nvidia's tuning guides
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

INSTRUCTIONS = {80: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}
#: head dims above 256 have no room in tensor memory, and their gradients run in tiles of 32 queries, which Hopper's products have not
INSTRUCTIONS_WIDE = INSTRUCTIONS | {100: "mma"}
_OF_AMPERE = frozenset(("keys_512", kernel, 90) for kernel in ("grad_q", "grad_k", "grad_v"))

#: Bytes of a thread's stack. Of the tiles for dk and dv at head dim 128 that were measured on an H200 (see shared/parts/tile_table.py),
#: the one that spills is faster than all that do not: four accumulators share the registers, and what spills is used once a block.
#: Elsewhere a few registers at most, used outside of the loops.
SPILLED = {"forward": 16, "grad_q": 16, "grad_q_kept": 16, "grad_kv": 304}
#: where something is added to the scores: 456 with Triton 3.7, 520 with 3.6; a loop over full tiles reads at most 8 registers of it
SPILLED_ADDED = 520
#: of head dims above 128 on small machines, and above 256
SPILLED_WIDE = {"forward": 48, "grad_q": 56, "grad_k": 80, "grad_v": 16, "grad_kv": 16}
#: faster all the same than those measured that spill less (wide_h200.csv)
SPILLED_MEASURED = {("keys_512", "grad_v", 90): 64}


def _is_wide(job: tuple[str, str, int]) -> bool:
    return CASES[job[0]].head_dim >= 256


def _is_daily(job: tuple[str, str, int]) -> bool:
    """All for Hopper; for the other machines each kernel once, at one of the two head dims by turns. Of wide heads also what is tight."""
    if job[2] == 90 or _is_wide(job):
        return job[2] in (89, 90)
    return (KERNELS.index(job[1]) + MACHINES.index(job[2])) % 2 == (job[0] == "causal_128")


_DAILY = [job for job in JOBS if _is_daily(job)]
_ALL = in_full(JOBS, daily=_DAILY)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[tuple[str, str, int], Found]:
    jobs = asked_for(request, "job")
    jobs += [(case, "grad_kv", 90) for name in asked_for(request, "name") for case in (name, "causal_128")]
    found = [Found(**each) for each in printed_by(compiling, *map(name_of, jobs))]
    return {(each.case, each.kernel, each.sm): each for each in found}


def test_each_kernel_is_compiled_for_each_machine() -> None:
    for case in ("causal_64", "causal_128"):
        assert {(kernel, sm) for name, kernel, sm in JOBS if name == case} == {
            (k, sm) for k in KERNELS for sm in MACHINES
        }
    wide = {(k, sm) for k in WIDE_KERNELS for sm in WIDE_MACHINES}
    assert {(kernel, sm) for name, kernel, sm in JOBS if name == "keys_512"} == wide
    assert {name for name, _, _ in JOBS} == set(CASES)


@pytest.mark.in_turns(4)
@of_a_known_compiler
@pytest.mark.parametrize("job", _ALL, ids=name_of)
def test_registers_suffice(job: tuple[str, str, int], compiled: dict[tuple[str, str, int], Found]) -> None:
    usual = SPILLED_WIDE if _is_wide(job) else SPILLED
    most = SPILLED_ADDED if job[0] in ADDED and job[1] == "grad_kv" else SPILLED_MEASURED.get(job, usual[job[1]])
    assert compiled[job].spilled <= most_spilled(most, f"triton {name_of(job)}")


@pytest.mark.parametrize("job", _ALL, ids=name_of)
def test_products_run_on_the_tensor_cores_of_the_machine(
    job: tuple[str, str, int], compiled: dict[tuple[str, str, int], Found]
) -> None:
    found = compiled[job]
    used = {name for name in ("mma", "wgmma", "tcgen05") if getattr(found, name)}
    wanted = (INSTRUCTIONS_WIDE if _is_wide(job) else INSTRUCTIONS)[found.sm]
    assert used == {"mma" if job in _OF_AMPERE else wanted}


# dq of kept scores has one product for each tile, and waits for it.
@pytest.mark.parametrize(
    "job", [job for job in JOBS if job[1] != "grad_q_kept" and job[2] == 90 and job not in _OF_AMPERE], ids=name_of
)
def test_products_of_hopper_overlap(job: tuple[str, str, int], compiled: dict[tuple[str, str, int], Found]) -> None:
    """ptxas makes all of them wait for each other if it can't follow one through a loop: a causal forward took 1.25 times as long."""
    found = compiled[job]
    assert 0 < 2 * found.waits <= found.products


@of_a_known_compiler
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_does_not_cross_shared_memory(name: str, compiled: dict[tuple[str, str, int], Found]) -> None:
    """Neither biases nor the scores' gradients that are kept: K and V do once a block, and dk and dv, which is the same without."""
    assert compiled[name, "grad_kv", 90].shared_stores == compiled["causal_128", "grad_kv", 90].shared_stores > 0


@pytest.mark.parametrize("job", _ALL, ids=name_of)
def test_shared_memory_suffices(job: tuple[str, str, int], compiled: dict[tuple[str, str, int], Found]) -> None:
    assert 0 < compiled[job].shared <= SHARED[job[2]]
