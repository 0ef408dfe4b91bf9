"""What trains through a library's autograd.Function is trained by a kernel of ours, if the gradient is the kernel's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_compiler.passes.spelling import library_calls
from tests import library_kernels
from tests.library_kernels import flash_attn_func
from tests.passes.compiling import compiled
from tests.passes.library_inputs import OURS, TOKENS, packed, qkv, trained


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    with library_kernels.installed():
        yield


@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_flash_attn_func_is_trained_by_our_kernel(softcap: float) -> None:
    """The head dim is padded inside of the library's autograd.Function, so it is there that the kernel is found."""
    run = trained(lambda q, k, v: flash_attn_func(q, k, v, causal=True, softcap=softcap), qkv(head_dim=12))
    assert run.site.pattern == library_calls.NAME
    assert run.site.spec.mask.words.startswith("causal")
    assert run.site.spec.needs_grad
    assert "autograd_function_apply" not in run.calls


def test_equal_layers_are_one_site() -> None:
    run = trained(lambda q, k, v: flash_attn_func(q, k, v).sin() + flash_attn_func(q, k, v).cos(), qkv())
    assert len(run.site.modules) == 2


def test_a_function_that_is_no_better_served_stays_the_library_s() -> None:
    """No kernel for CPUs leaves out blocks, and a dense mask is none that the library needs."""
    run = trained(lambda q, k, v: flash_attn_func(q, k, v, window_size=(3, 0)), qkv(), lowerings=None)
    assert run.site.decision.lowering == "untouched"
    assert "autograd_function_apply" in run.calls


def test_documents_are_trained_by_our_kernel() -> None:
    *inputs, bounds = packed()
    run = trained(lambda q, k, v: library_kernels.FlashAttnVarlenFunc.apply(q, k, v, bounds, 0.3), inputs)
    assert run.site.spec.mask.words.startswith("causal ∧ document")
    assert "autograd_function_apply" not in run.calls


_NOT_Q = "the gradient that its autograd.Function gives for q is not that of its kernel"
_NOT_K = "the gradient that its autograd.Function gives for k is not that of its kernel"
_NOT_OUT = "its backward is given something else than the gradient of the attention"


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (library_kernels.TwiceTheGradient, "its autograd.Function also calls mul"),
        (library_kernels.AnotherScaleBackward, "softmax_scale is 0.28"),
        (library_kernels.NoGradientOfQ, _NOT_Q),
        (library_kernels.SwappedGradients, _NOT_K),
        (library_kernels.HalfOfTheGradient, _NOT_Q),
        (library_kernels.HalfOfTheGradientOfOut, _NOT_OUT),
        (library_kernels.ShiftedPadding, _NOT_OUT),
        (library_kernels.FirstKeys, "its operands are not three inputs of its autograd.Function, padded"),
        (library_kernels.SavesAnother, "v of its backward is not what its forward had"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_another_gradient_is_not_ours_to_change(function: Any, told: str) -> None:
    run = trained(lambda q, k, v: flash_attn_func(q, k, v, function=function), qkv(head_dim=12))
    (miss,) = run.report.misses
    assert told in miss.reason.observed
    assert "autograd_function_apply" in run.calls


def test_another_result_is_not_the_attention() -> None:
    inputs = [x.requires_grad_() for x in qkv()]
    run = compiled(lambda *x: flash_attn_func(*x, function=library_kernels.GivesTheSums), inner="aot_eager", **OURS)
    assert run(*inputs).shape == (1,)
    (miss,) = run.report.misses
    assert "gives something else than the attention" in miss.reason.observed


def test_the_documents_of_the_backward_may_be_others() -> None:
    *inputs, bounds = packed()
    others = torch.tensor([0, 9, TOKENS], dtype=torch.int32)
    run = trained(lambda q, k, v: library_kernels.OtherDocuments.apply(q, k, v, bounds, 0.3, others), inputs)
    (miss,) = run.report.misses
    assert "cu_seqlens_q of its backward is not what its forward had" in miss.reason.observed
