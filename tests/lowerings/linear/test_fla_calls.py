"""flash-linear-attention's functions below a leaf op compute the delta rule, with all gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("fla.ops.kda")

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear import fla_calls, fla_op, triton_ops
from attn_compiler.spec.linear import LinearForm
from attn_compiler.spec.target import Target
from tests.lowerings.linear import linear_forms
from tests.lowerings.linear.fla_interpreted import interpreted
from tests.lowerings.linear.triton_problems import FORMS, problem
from tests.thinned import further

_FORMS = pytest.mark.parametrize("name", ["delta", "channel"])


@pytest.fixture
def in_interpreter() -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("in Triton's interpreter")
    with interpreted():
        yield


def _outs(form: LinearForm, given: list[Tensor], run: Any, noise: list[Tensor]) -> list[Tensor]:
    """Results, states and gradients."""
    outs = run(given)
    return [*outs, *torch.autograd.grad(outs, given, [x.to(y.dtype) for x, y in zip(noise, outs, strict=True)])]


def _far(form: LinearForm, given: list[Tensor]) -> list[float]:
    """The errors of results, states and gradients, to float64, of all numbers."""
    exact = dataclasses.replace(form, out_dtype="float64", state_dtype="float64")
    wide = [x.detach().double().requires_grad_() for x in given]
    noise = [torch.randn_like(x).detach() for x in definition(exact, wide)]
    wanted = _outs(exact, wide, lambda x: definition(exact, x), noise)
    found = _outs(form, given, lambda x: fla_op.run(x, form.text), noise)
    pairs = [(one.detach().double(), other.detach()) for one, other in zip(found, wanted, strict=True)]
    return [float((one - other).norm() / (other.norm() or 1.0)) for one, other in pairs]


@_FORMS
@pytest.mark.parametrize(
    "sizes", further([(70, 2, 4, 16, 16), (130, 1, 1, 16, 24), (1, 2, 2, 16, 16)], daily=[(1, 2, 2, 16, 16)]), ids=str
)
@pytest.mark.usefixtures("in_interpreter")
def test_it_is_the_recurrence(name: str, sizes: tuple[int, int, int, int, int]) -> None:
    torch.manual_seed(0)
    assert max(_far(FORMS[name], problem(FORMS[name], sizes, batch=1))) < 1e-5


def _given(name: str, length: int) -> tuple[Any, ...]:
    x = dict(zip(FORMS[name].roles, problem(FORMS[name], (length, 2, 2, 16, 16)), strict=True))
    return x["q"], x["k"], x["v"], x["g"], x["beta"], None, x.get("state"), FORMS[name].text


@_FORMS
@pytest.mark.usefixtures("in_interpreter")
def test_the_op_is_as_pytorch_wants_ops(name: str) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    op = triton_ops._OPS.fla_chunks.default
    given = _given(name, 20)
    with torch.no_grad():
        for x in given[:2]:
            x /= x.norm(dim=-1, keepdim=True)
    torch.library.opcheck(op, given, test_utils=checks)


@pytest.mark.usefixtures("in_interpreter")
def test_what_is_not_there_has_an_empty_gradient() -> None:
    *operands, text = (x.detach() if isinstance(x, Tensor) else x for x in _given("channel", 20))
    out, last = fla_calls.forward(*operands, text)
    grads = fla_calls.backward(torch.ones_like(out), torch.ones_like(last), *operands, text)
    assert [x.numel() == 0 for x in grads] == [False] * 5 + [True] * 2


@pytest.mark.gpu
@_FORMS
@pytest.mark.parametrize("sizes", [(333, 2, 4, 128, 128), (257, 2, 2, 64, 64), (1, 16, 32, 128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_it_is_the_recurrence_in_half_precision(
    name: str, sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    """Not within twice the error of the model's own function: docs/linear.md."""
    torch.manual_seed(0)
    form = dataclasses.replace(FORMS[name], out_dtype=str(dtype).removeprefix("torch."))
    given = problem(form, sizes, dtypes=dict.fromkeys(("q", "k", "v", "beta"), dtype), device="cuda")
    spec = linear_forms.spec(form, device="cuda", dtype=form.out_dtype, needs_grad=True)
    refused = fla_op.LinearFla().why_not(spec, Target.current("cuda"))
    if refused:
        # fla itself refuses gradients of the delta rule on Hopper with older Triton.
        pytest.skip(str(refused[0].observed))
    assert max(_far(form, given)) < (2e-2 if dtype == torch.bfloat16 else 5e-3)
