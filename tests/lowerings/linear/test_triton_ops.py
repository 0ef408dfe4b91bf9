"""`linear_chunks` as torch.compile sees it: its fake, its gradient's fake and its formula of autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attn_compiler.lowerings.linear import triton_ops
from tests.lowerings.linear.triton_problems import FORMS, problem
from tests.thinned import further

_OPS: Any = triton_ops._OPS
_FORMS = pytest.mark.parametrize("name", list(FORMS))


def _given(name: str, length: int, *, with_state: bool) -> tuple[Any, ...]:
    x = dict(zip(FORMS[name].roles, problem(FORMS[name], (length, 2, 4, 16, 24)), strict=True))
    state = x.get("state") if with_state else None
    if name != "ssd":
        return x["q"], x["k"], x["v"], x["g"], x["beta"], None, state, FORMS[name].text
    steps = x["dt"].detach().abs().requires_grad_()
    decay = (-steps.detach()).requires_grad_()
    return x["C"], x["B"], x["x"], decay, steps, x["D"], state, FORMS[name].text


@_FORMS
@pytest.mark.parametrize("case", further([(20, True), (1, True), (70, False)], daily=[(20, True)]), ids=str)
def test_the_op_is_as_pytorch_wants_ops(name: str, case: tuple[int, bool]) -> None:
    length, with_state = case
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(_OPS.linear_chunks.default, _given(name, length, with_state=with_state), test_utils=checks)


@_FORMS
def test_the_fake_of_the_gradient_is_what_it_gives(name: str) -> None:
    given = _given(name, 70, with_state=True)
    operands = [x.detach() if isinstance(x, Tensor) else x for x in given]
    out, last = _OPS.linear_chunks(*operands)
    found = _OPS.linear_chunks_backward(torch.ones_like(out), torch.ones_like(last), *operands)
    fakes = triton_ops._fake_backward(out, last, *operands)
    for one, fake in zip(found, fakes, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (fake.shape, fake.dtype, fake.stride())


@_FORMS
def test_a_state_that_q_alone_wants_gradients_of_has_none(name: str) -> None:
    """As in eager mode: the last state is made of all operands but q and the skip."""
    given = [x.detach() if isinstance(x, Tensor) else x for x in _given(name, 20, with_state=True)]
    for at, wants in ((0, False), (1, True)):
        mine = [x.clone().requires_grad_(i == at) if isinstance(x, Tensor) else x for i, x in enumerate(given)]
        out, last = _OPS.linear_chunks(*mine)
        assert (out.requires_grad, last.requires_grad) == (True, wants)
        (found,) = torch.autograd.grad(out.float().sum(), [mine[at]])
        assert bool(found.any())
