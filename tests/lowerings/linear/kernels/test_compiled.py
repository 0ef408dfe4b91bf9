"""Compiled for several GPUs, the kernels of linear attention fit, within bounds that are written down."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from attn_compiler.lowerings.linear import triton_op
from tests.lowerings.linear.kernels import compiling
from tests.lowerings.linear.kernels.bounds import OutOfBoundsError, within_bounds
from tests.lowerings.linear.kernels.compiling import Found, jobs
from tests.lowerings.linear.kernels.interpreted import with_bfloat16
from tests.lowerings.linear.triton_problems import FORMS, problem
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by
from tests.thinned import further, in_full

pytest.importorskip("triton")

# Compiled for an A100 and for Hopper, the kernels of linear attention use the tensor cores.

#: bytes that a block may have, of Nvidia's tuning guides
_SHARED = {80: 163 * 1024, 90: 227 * 1024}
_WITHOUT_PRODUCTS = frozenset({"one_token", "row_gradients", "decay_gradients"})
#: Bytes of a thread's stack, of models' heads in bfloat16. Kernels of gradients spill what they use once, after their loop.
_SPILLED = {
    "head_gradients": 1080,
    "channel_gradients": 500,
    "channel_chunks": 200,
    "state_pass": 540,
    "reverse_pass": 1400,
    "value_gradients": 290,
    "channel_pair_gradients": 420,
    "head_gradients_sm90": 500,
    "state_pass_sm90": 260,
    "reverse_pass_sm90": 64,
    "space_gradients_sm90": 1500,
}
_SPILLED_80 = {
    "head_chunks": 1400,
    "channel_chunks": 720,
    "state_pass": 1700,
    "head_gradients": 2000,
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
        assert not found.under_way, found
        # For Hopper, outputs of the state space make the products of q and k.
        if (found.case, found.kernel) != ("bamba", "head_chunks"):
            assert (found.products > 0) == (found.kernel not in _WITHOUT_PRODUCTS), found


# No kernel of linear attention leaves the memory of its tensors, whatever the length and the sizes of heads.

#: (length, heads of k, heads of v, K, V)
_ODD = ((1, 2, 4, 24, 40), (100, 1, 2, 24, 40), (37, 1, 3, 5, 7), (130, 1, 1, 64, 16), (65, 1, 1, 136, 200))
_HALF = dict.fromkeys(("q", "k", "v", "x", "B", "C", "beta"), torch.bfloat16)


@triton.jit
def _copy(X, Y, size, MORE: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(Y + at, tl.load(X + at, mask=at < size + MORE, other=0.0), mask=at < size)


@pytest.mark.parametrize("more", [0, 1])
def test_what_leaves_its_tensors_is_seen(more: int) -> None:
    x, y = torch.randn(10), torch.randn(10)
    with within_bounds():
        if more:
            with pytest.raises(InterpreterError) as caught:
                _copy[(1,)](x, y, 10, more)
            assert isinstance(caught.value.__cause__, OutOfBoundsError)
            assert str(caught.value.__cause__) == "_copy: 1 of 11 addresses"
        else:
            _copy[(1,)](x, y, 10, more)
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("sizes", further(_ODD, daily=_ODD[:3]), ids=str)
@pytest.mark.parametrize("is_half", [False, True])
def test_no_kernel_leaves_its_tensors(name: str, sizes: tuple[int, int, int, int, int], is_half: bool) -> None:
    form = FORMS[name]
    if is_half and name != "ssd":
        form = dataclasses.replace(form, out_dtype="bfloat16")
    given = problem(form, sizes, dtypes=_HALF if is_half else None)
    with with_bfloat16(), within_bounds():
        outs = triton_op.run(given, form.text)
        torch.autograd.grad(outs, given, [torch.randn_like(x) for x in outs])
