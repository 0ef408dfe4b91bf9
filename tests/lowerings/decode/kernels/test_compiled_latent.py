"""Compiled for four families of GPUs with the table's schedules, the kernels over a latent fit, and use tensor cores."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.lowerings.decode.kernels import compiling_latent
from tests.lowerings.decode.kernels.compiling_latent import JOBS, Found
from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.lowerings.triton.kernels.test_compiled import SHARED


@pytest.fixture(scope="module")
def compiled() -> list[Found]:
    return [Found(**each) for each in printed_by(compiling_latent)]


@pytest.mark.further
@of_a_known_compiler
def test_registers_and_shared_memory_suffice(compiled: list[Found]) -> None:
    assert len(compiled) == 2 * len(JOBS)
    for found in compiled:
        assert found.spilled <= most_spilled(0, f"decode_latent {found.kernel}"), found
        assert found.shared <= SHARED[found.sm], found


@of_a_known_compiler
def test_products_are_those_of_tensor_cores_and_tiles_are_copied_ahead(compiled: list[Found]) -> None:
    for found in compiled:
        if found.kernel != "combine_latent":
            assert found.copies > 0, found
            assert found.mma + found.wgmma > 0, found


@of_a_known_compiler
def test_many_heads_are_the_rows_of_large_tiles_on_sm90(compiled: list[Found]) -> None:
    rows = {(found.heads, found.sm): found.rows for found in compiled}
    assert (rows[16, 90], rows[32, 90], rows[128, 90], rows[128, 80]) == (16, 32, 64, 16)
    large = [found for found in compiled if found.rows == 64 and found.kernel == "attention_decode_latent"]
    # Products of whole groups of warps are what 64 rows are for.
    assert all(found.wgmma > 0 for found in large)


@of_a_known_compiler
def test_the_kernel_for_hopper_waits_where_it_says(compiled: list[Found]) -> None:
    """A wait that the compiler adds, since it lost sight of which products are under way, ends that they run during the softmax. Products:
    36 of the scores, twice, and 4 of each half of the output, of which the left one stands twice."""
    (found,) = (found for found in compiled if found.kernel == "attention_latent_sm90")
    assert (found.heads, found.sm) == (128, 90)
    assert (found.wgmma, found.waits) == (84, 5)
