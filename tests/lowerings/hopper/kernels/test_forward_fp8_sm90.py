"""Compiled for Hopper, the kernel multiplies FP8 (or int8) on its tensor cores, and little spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.lowerings.hopper.kernels import compiling_fp8
from tests.lowerings.hopper.kernels.compiling_fp8 import JOBS, Found, Job
from tests.lowerings.shared.kernels.compilers import most_spilled, of_a_known_compiler, printed_by
from tests.thinned import asked_for, in_full

SHARED = 227 * 1024
#: bytes of a thread, of up to forty words at head dim 64 where four warpgroups share the registers, and a window's or a softcap's tile
SPILLED = 192

#: Each format, switch, optional tensor and head dim, and what has most to keep in registers.
_DAILY = ("causal_128", "int8_64", "e5m2_64", "window_128", "lengths_full_128", "window_softcap_sinks_64")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Found]:
    names = [job.name for job in asked_for(request, "job")]
    return {each["name"]: Found(**each) for each in printed_by(compiling_fp8, *names)}


@pytest.mark.in_turns(3)
@of_a_known_compiler
@pytest.mark.parametrize("job", in_full(JOBS, daily=lambda job: job.name in _DAILY), ids=lambda job: job.name)
def test_products_are_those_of_its_formats(job: Job, compiled: dict[str, Found]) -> None:
    found = compiled[job.name]
    assert found.shared <= SHARED
    assert found.spilled <= most_spilled(SPILLED, f"hopper_fp8 {job.name}")
    assert not found.unset
    v = {"fp8e4nv": "f32.e4m3.e4m3", "fp8e5": "f32.e5m2.e5m2"}[job.v]
    qk = "s32.s8.s8" if job.qk == "i8" else v
    assert {name.split(".", 5)[-1] for name in found.instructions} >= {v}
    assert any(qk in name for name in found.instructions)
    assert all(v in name or qk in name for name in found.instructions)
