"""Compiled for GPUs with FP8, the kernel multiplies FP8 on their tensor cores; registers and shared memory suffice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.lowerings.kernels import compiling_fp8
from tests.lowerings.kernels.compilers import of_a_known_compiler
from tests.lowerings.kernels.compiling_fp8 import CASES, JOBS, RECIPES, Found

ROOT = Path(__file__).parents[3]
#: bytes that a block may have, of Nvidia's tuning guides
SHARED = 227 * 1024


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str, int], Found]:
    """In a process of its own: this one's Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", compiling_fp8.__name__]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {(each["case"], each["recipe"], each["sm"]): Found(**each) for each in json.loads(done.stdout)}


def test_every_case_and_recipe_is_compiled() -> None:
    assert {name for name, _, _ in JOBS} == set(CASES)
    assert {recipe for _, recipe, _ in JOBS} == set(RECIPES)


@of_a_known_compiler
@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_products_are_those_of_fp8_and_nothing_spills(
    job: tuple[str, str, int], compiled: dict[tuple[str, str, int], Found]
) -> None:
    found = compiled[job]
    assert found.spilled == 0
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
