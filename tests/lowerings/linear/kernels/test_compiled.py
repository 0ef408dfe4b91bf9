"""Compiled for an A100 and for Hopper, the kernels of linear attention use the tensor cores; registers and shared memory suffice."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.lowerings.linear.kernels import compiling
from tests.lowerings.linear.kernels.compiling import Found, jobs
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by
from tests.thinned import further, in_full

#: bytes that a block may have, of Nvidia's tuning guides
_SHARED = {80: 163 * 1024, 90: 227 * 1024}
_WITHOUT_PRODUCTS = frozenset({"one_token", "row_gradients", "channel_sums", "decay_gradients"})
#: Bytes of a thread's stack, of models' heads in bfloat16. Kernels of gradients spill what they use once, after their loop.
_SPILLED = {
    "head_gradients": 1040,
    "channel_gradients": 290,
    "channel_pairs": 100,
    "state_pass": 540,
    "reverse_pass": 680,
    "value_gradients": 290,
    "channel_pair_gradients": 80,
}
_SPILLED_80 = {
    "state_pass": 340,
    "reverse_pass": 840,
    "head_gradients": 1840,
    "value_gradients": 760,
    "channel_gradients": 400,
}
#: of float32, and of heads of 256
_SPILLED_ELSEWHERE = 12288
_MODELS = ("qwen3_next", "kimi", "bamba")


@of_a_known_compiler
@pytest.mark.parametrize("job", further(["bamba-90", "qwen3_next-90", "kimi-90"], daily=["bamba-90"]))
def test_without_wgmma_there_is_none(job: str) -> None:
    """Triton reads the variable when it compiles, and has it in the keys of its cache."""
    found = [Found(**each) for each in printed_by(compiling, job, DISABLE_MMA_V3="1")]
    assert all(one.wgmma == 0 for one in found)
    assert any(one.products > 0 for one in found)
    assert any(Found(**each).wgmma for each in printed_by(compiling, job))


@pytest.mark.parametrize("job", in_full(jobs(), daily=["bamba-90"]))
@of_a_known_compiler
def test_registers_and_shared_memory_suffice(job: str) -> None:
    for each in printed_by(compiling, job):
        found = Found(**each)
        most = _SPILLED | (_SPILLED_80 if found.sm == 80 else {})
        usual = most.get(found.kernel, 32) if found.case in _MODELS else _SPILLED_ELSEWHERE
        assert found.spilled <= usual, found
        assert found.shared <= _SHARED[found.sm], found
        assert (found.products > 0) == (found.kernel not in _WITHOUT_PRODUCTS), found
