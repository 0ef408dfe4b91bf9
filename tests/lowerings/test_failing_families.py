"""What each family gives where its kernels fail: the same by its definition, forward and backward, and one warning a text.

tests/test_kernel_failures.py plants failures of the Triton family and of decoding in whole compiled steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.cudnn import frontend, launch as cudnn_launch, ops as cudnn_ops
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.lowerings.fa4 import launch as fa4_launch
from attn_compiler.lowerings.hopper import backward_launch, fp8_launch, launch as hopper_launch
from attn_compiler.lowerings.plain import reference
from attn_compiler.lowerings.shared.calls.failures import FAILURES
from attn_compiler.reasons.errors import AttnCompilerWarning
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from tests import numerics
from tests.lowerings import call_math, kernel_problems
from tests.lowerings.fa4 import cases as fa4_cases
from tests.lowerings.fp8 import problems as fp8_problems
from tests.lowerings.hopper import problems as hopper_problems
from tests.lowerings.hopper.test_fp8_launch import assert_near
from tests.lowerings.hopper.test_launch import ADDED, CASES as HOPPER, MASKED
from tests.lowerings.kernel_cases import BY_NAME, Case

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a planted failure on tensors of the CPU")


@pytest.fixture(autouse=True)
def _told() -> Iterator[None]:
    """Each failure is told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    FAILURES.forget()
    assert [w for w in caught if issubclass(w.category, AttnCompilerWarning) and "AC917" in str(w.message)]


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Triton Error [CUDA]: planted")


@pytest.mark.parametrize("case", [*HOPPER, *ADDED, *MASKED], ids=lambda case: case.name)
def test_hoppers_forward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_launch, "launch", _fail)
    problem = hopper_problems.build(case, device="cpu")
    with kernel_problems.planned(problem.plan), torch.no_grad():
        found = hopper_launch.forward(problem.q, problem.k, problem.v, hopper_problems.operands(problem), problem.text)
    exact = kernel_problems.expected(problem, torch.float64)[:2]
    kernel_problems.assert_close_to(found, exact, kernel_problems.expected(problem, torch.float32)[:2], problem)


@pytest.mark.parametrize("name", ["causal", "keys_left", "documents", "sinks_keys_none", "softcap_keys", "gqa"])
@pytest.mark.parametrize("in_order", [False, True])
def test_hoppers_backward(name: str, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_launch, "launch", _fail)
    monkeypatch.setattr(type(hopper_problems.backward_of(in_order=in_order)), "first", _fail)
    problem = hopper_problems.build(BY_NAME[name], device="cpu")
    out, lse, *grads = kernel_problems.expected(problem, torch.float32)
    upstream = kernel_problems.upstream(problem, out, lse)
    with kernel_problems.planned(problem.plan), torch.no_grad():
        *found, further = hopper_problems.backward_of(in_order=in_order)(
            *upstream, problem.q, problem.k, problem.v, hopper_problems.grad_operands(problem), out, lse, problem.text
        )
    for got, right in zip([*found, *further], grads, strict=True):
        torch.testing.assert_close(got, right.to(got.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gqa", "window_from_end", "sinks", "softcap"])
@pytest.mark.parametrize("smooth", [False, True])
def test_fp8(name: str, smooth: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_launch, "launch", _fail)
    recipe = Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=smooth, hadamard=smooth)
    given = fp8_problems.build(BY_NAME[name], recipe, dtype=torch.float16)
    problem = given.problem
    with kernel_problems.planned(problem.plan), torch.no_grad():
        out, lse = fp8_launch.forward(problem.q, problem.k, problem.v, given.operands, problem.text)
    assert_near(given, out, lse, share=0.002, atol=2e-3)


CALLS = {
    "causal": CudnnCall(scale=0.25, right=0, needs_grad=True),
    "window from the end": CudnnCall(scale=0.25, left=5, right=2, from_end=True, needs_grad=True),
    "lengths, sinks": CudnnCall(scale=0.25, lengths=True, sinks=True, sinks_grad=True, needs_grad=True),
    "bias": CudnnCall(scale=0.25, bias=True, bias_grad=True, needs_grad=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_cudnn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(frontend.PLANS), "get", _fail)
    torch.manual_seed(0)
    call = CALLS[name]
    q = torch.randn(2, 4, 24, 16)
    k, v = torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 16)
    bias = (1, 4, 24, 30) if call.bias else None
    lengths = [30, 11] if call.lengths else None
    named = call_math.operands(
        call, batch=2, heads=4, seqlen_q=24, bias=bias, lengths=lengths, dtype=torch.float32, device="cpu"
    )
    problem = call_math.Problem(call=call, q=q, k=k, v=v, named=named)

    def fused(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Tensor]) -> Tensor:
        return _Cudnn.apply(q, k, v, call, *(named[name] for name in call.operands))

    call_math.assert_within_rule(problem, fused)


class _Cudnn(torch.autograd.Function):
    """Both bodies, and the sinks' gradient that the graph computes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: CudnnCall, *operands: Tensor) -> Tensor:
        out, lse = cudnn_launch.forward(q, k, v, list(operands), call.to_text())
        ctx.call, ctx.count = call, len(operands)
        ctx.save_for_backward(q, k, v, out, lse, *operands)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, *operands = ctx.saved_tensors
        text = ctx.call.to_text()
        given = (grad, torch.zeros_like(lse), q, k, v, operands, out, lse, text)
        *grads, further = cudnn_launch.gradients(*given)
        own = iter(further)
        in_graph = cudnn_ops.in_graph(grad, out, lse, operands, text)
        of_operands = [
            next(own) if name in ctx.call.by_kernel else by_node
            for name, by_node in zip(ctx.call.operands, in_graph, strict=True)
        ]
        return (*grads, None, *of_operands)


@pytest.mark.parametrize("problem", fa4_cases.PROBLEMS[:10], ids=lambda problem: problem.name)
def test_flash_attention_4(problem: Any) -> None:
    """It is not installed here, so both of its functions fail."""
    given = fa4_cases.inputs(problem, device="cpu")
    q, k, v, text = given.q, given.k, given.v, given.text()
    further = [*([] if given.mask is None else [given.mask]), *given.operands]
    with torch.no_grad():
        out, lse = fa4_launch.forward(q, k, v, given.operands, text)
        exact = reference.forward(q, k, v, further, given.spec)
        grads = fa4_launch.gradients(
            torch.ones_like(out), torch.zeros_like(lse), q, k, v, given.operands, out, lse, text
        )
        right = reference.backward(torch.ones_like(out), torch.zeros_like(lse), q, k, v, further, given.spec)
    found, expected = [out, *grads[:3], *grads[3]], [exact[0], *right[:3], *right[3]]
    for got, one in zip(found, expected, strict=True):
        assert numerics.worst(got, one) <= 0.02 * max(float(one.abs().max()), 1.0)
