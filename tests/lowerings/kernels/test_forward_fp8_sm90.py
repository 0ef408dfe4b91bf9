"""Compiled for Hopper, the kernel multiplies FP8 (or int8) on its tensor cores, and next to nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.lowerings.kernels import compiling_fp8_sm90
from tests.lowerings.kernels.compilers import of_a_known_compiler
from tests.lowerings.kernels.compiling_fp8_sm90 import JOBS, Found, Job

ROOT = Path(__file__).parents[3]
SHARED = 227 * 1024
#: bytes of a thread, of up to thirty words at head dim 128 where a mask or scales are held too
SPILLED = 128


@pytest.fixture(scope="module")
def compiled() -> dict[str, Found]:
    """In a process of its own: this one's Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", compiling_fp8_sm90.__name__]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {each["name"]: Found(**each) for each in json.loads(done.stdout)}


@of_a_known_compiler
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_products_are_those_of_its_formats(job: Job, compiled: dict[str, Found]) -> None:
    found = compiled[job.name]
    assert found.shared <= SHARED
    assert found.spilled <= (SPILLED if job.head_dim == 128 else 0)
    v = {"fp8e4nv": "f32.e4m3.e4m3", "fp8e5": "f32.e5m2.e5m2"}[job.v]
    qk = "s32.s8.s8" if job.qk == "i8" else v
    assert {name.split(".", 5)[-1] for name in found.instructions} >= {v}
    assert any(qk in name for name in found.instructions)
    assert all(v in name or qk in name for name in found.instructions)
