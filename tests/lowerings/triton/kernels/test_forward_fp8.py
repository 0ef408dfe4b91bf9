"""Compiled for GPUs with FP8, the kernel multiplies FP8 on their tensor cores; registers and shared memory suffice."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.lowerings.triton.kernels import compiling_fp8 as compiling
from tests.lowerings.triton.kernels.compiling_fp8 import CASES, JOBS, RECIPES, Found

#: bytes that a block may have, of Nvidia's tuning guides
SHARED = 227 * 1024


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str, int], Found]:
    return {(each["case"], each["recipe"], each["sm"]): Found(**each) for each in printed_by(compiling)}


def test_every_case_and_recipe_is_compiled() -> None:
    assert {name for name, _, _ in JOBS} == set(CASES)
    assert {recipe for _, recipe, _ in JOBS} == set(RECIPES)


@pytest.mark.in_turns(3)
@of_a_known_compiler
@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_products_are_those_of_fp8_and_nothing_spills(
    job: tuple[str, str, int], compiled: dict[tuple[str, str, int], Found]
) -> None:
    found = compiled[job]
    assert found.spilled <= most_spilled(0, f"triton_fp8 {'-'.join(map(str, job))}")
    assert 0 < found.shared <= SHARED
    assert found.instructions
    for instruction in found.instructions:
        if found.sm == 100:
            assert re.fullmatch(r"tcgen05\.mma.*f8f6f4", instruction)
        elif job[0] == "few_128":
            # Fewer queries than its tensor cores take in FP8: Triton multiplies in float16 then.
            assert re.fullmatch(r"mma\.sync.*f16\.f16.*", instruction)
        else:
            assert re.fullmatch(r"wgmma\.mma_async.*f32\.e4m3\.e4m3", instruction)
