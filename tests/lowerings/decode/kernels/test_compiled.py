"""Compiled for four families of GPUs with the table's schedules, the decode kernels hardly spill, copy ahead, and use tensor cores."""

from __future__ import annotations

import pytest

from tests.lowerings.decode.kernels import compiling, compiling_latent
from tests.lowerings.decode.kernels.compiling import CASES, JOBS, MACHINES, Found
from tests.lowerings.decode.kernels.compiling_latent import JOBS as LATENT_JOBS, Found as FoundLatent
from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.lowerings.triton.kernels.compiling import name_of
from tests.lowerings.triton.kernels.test_compiled import SHARED

pytest.importorskip("triton")

# Compiled for four families of GPUs with the table's schedules, the decode kernel hardly spills, and copies ahead of its products.

#: Bytes of a thread's stack: Triton 3.7 has one or two registers fewer than needed at head dim 128 on some machines, 3.6 at 80.
SPILLED = 8
#: With a dense mask of 64 rows, which no measured case has.
SPILLED_WITH_A_MASK = 80
#: Of 32 rows of 512 dims, which is faster all the same than what does not spill.
SPILLED_WIDE = 80


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], Found]:
    found = [Found(**each) for each in printed_by(compiling)]
    return {(each.case, each.sm): each for each in found}


def test_it_is_compiled_for_each_machine() -> None:
    for case in ("head_dim_64", "head_dim_128"):
        assert {sm for name, sm in JOBS if name == case} == set(MACHINES)
    assert {name for name, _ in JOBS} == set(CASES)


@pytest.mark.in_turns(2)
@of_a_known_compiler
@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_registers_and_shared_memory_suffice(job: tuple[str, int], compiled: dict[tuple[str, int], Found]) -> None:
    found = compiled[job]
    usual = {"queries": SPILLED_WITH_A_MASK, "rows_512": SPILLED_WIDE}.get(found.case, SPILLED)
    assert found.spilled <= most_spilled(usual, f"decode {found.case}")
    assert 0 < found.shared <= SHARED[found.sm]


@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_products_run_on_tensor_cores_while_keys_and_values_come(
    job: tuple[str, int], compiled: dict[tuple[str, int], Found]
) -> None:
    found = compiled[job]
    assert found.mma > 0
    assert found.copies > 0


def test_a_cache_in_fp8_is_not_taken_apart(compiled: dict[tuple[str, int], Found]) -> None:
    """With products in bfloat16, each number of a tile of 128 keys was converted by itself, and each of V loaded by itself: 256 and 128."""
    assert compiled["fp8", 90].singles == 0


# Compiled for four families of GPUs with the table's schedules, the kernels over a latent fit, and use tensor cores.
@pytest.fixture(scope="module")
def compiled_latent() -> list[FoundLatent]:
    return [FoundLatent(**each) for each in printed_by(compiling_latent)]


@pytest.mark.further
@of_a_known_compiler
def test_registers_and_shared_memory_suffice_latent(compiled_latent: list[FoundLatent]) -> None:
    assert len(compiled_latent) == 2 * len(LATENT_JOBS)
    for found in compiled_latent:
        assert found.spilled <= most_spilled(0, f"decode_latent {found.kernel}"), found
        assert found.shared <= SHARED[found.sm], found


@of_a_known_compiler
def test_products_are_those_of_tensor_cores_and_tiles_are_copied_ahead(compiled_latent: list[FoundLatent]) -> None:
    for found in compiled_latent:
        if found.kernel != "combine_latent":
            assert found.copies > 0, found
            assert found.mma + found.wgmma > 0, found


@of_a_known_compiler
def test_many_heads_are_the_rows_of_large_tiles_on_sm90(compiled_latent: list[FoundLatent]) -> None:
    rows = {(found.heads, found.sm): found.rows for found in compiled_latent}
    assert (rows[16, 90], rows[32, 90], rows[128, 90], rows[128, 80]) == (16, 32, 64, 16)
    large = [found for found in compiled_latent if found.rows == 64 and found.kernel == "attention_decode_latent"]
    # Products of whole groups of warps are what 64 rows are for.
    assert all(found.wgmma > 0 for found in large)


@of_a_known_compiler
def test_the_kernel_for_hopper_waits_where_it_says(compiled_latent: list[FoundLatent]) -> None:
    """A wait that the compiler adds, since it lost sight of which products are under way, ends that they run during the softmax. Products:
    36 of the scores, twice, and 4 of each half of the output, of which the left one stands twice."""
    (found,) = (found for found in compiled_latent if found.kernel == "attention_latent_sm90")
    assert (found.heads, found.sm) == (128, 90)
    assert (found.wgmma, found.waits) == (84, 5)
