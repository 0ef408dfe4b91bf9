"""No kernel of linear attention leaves the memory of its tensors, whatever the length and the sizes of heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from attn_compiler.lowerings.linear import triton_op
from tests.lowerings.linear.kernels.bounds import OutOfBoundsError, within_bounds
from tests.lowerings.linear.kernels.interpreted import with_bfloat16
from tests.lowerings.linear.triton_problems import FORMS, problem
from tests.thinned import further

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
