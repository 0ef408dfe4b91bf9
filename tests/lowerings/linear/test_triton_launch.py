"""The forward kernels compute the recurrence: lengths around chunks, groups, states, however the operands lie in memory."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")

from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear import triton_op
from tests.lowerings.linear.triton_problems import FORMS, furthest, problem

_FORMS = pytest.mark.parametrize("name", list(FORMS))
_FLOAT = 5e-6


@_FORMS
@pytest.mark.parametrize("length", [1, 70])
def test_a_state_and_a_skip_may_be_absent(name: str, length: int) -> None:
    form = FORMS[name]
    roles = tuple(role for role in form.roles if role not in ("state", "D"))
    given = dict(zip(form.roles, problem(form, (length, 2, 2, 16, 16)), strict=True))
    short = dataclasses.replace(form, roles=roles)
    assert max(furthest(short, [given[role] for role in roles]).values()) < _FLOAT


@_FORMS
def test_no_tokens_leave_the_state(name: str) -> None:
    form = FORMS[name]
    given = dict(zip(form.roles, problem(form, (0, 2, 2, 16, 16)), strict=True))
    out, last = triton_op.run(list(given.values()), form.text)
    assert out.numel() == 0
    assert torch.equal(last, given["state"] if "state" in given else torch.zeros_like(last))


@_FORMS
def test_dtypes_are_the_function_own(name: str) -> None:
    form = dataclasses.replace(FORMS[name], out_dtype="float16", state_dtype="float16")
    given = problem(form, (40, 2, 2, 16, 16), dtypes=dict.fromkeys(("q", "k", "v", "x", "B", "C"), torch.float16))
    out, last = triton_op.run(given, form.text)
    assert (out.dtype, last.dtype) == (torch.float16, torch.float16)
    found = furthest(form, given)
    assert max(found.values()) < 2e-3, found


@_FORMS
@pytest.mark.parametrize("length", [1, 70])
def test_what_lies_beside_an_operand_is_not_read(name: str, length: int) -> None:
    """Operands are parts of larger tensors, whose other numbers are no numbers."""
    form = FORMS[name]
    given = problem(form, (length, 2, 4, 16, 24))
    apart = []
    for x in given:
        if x.dim() < 2:
            apart.append(x.detach().clone().requires_grad_())
            continue
        around = x.new_full([size + 3 for size in x.shape], math.nan)
        inner = around[tuple(slice(1, 1 + size) for size in x.shape)]
        inner.copy_(x.detach())
        apart.append(inner.detach().requires_grad_())
    found = furthest(form, apart)
    assert max(found.values()) < _FLOAT, found


@_FORMS
@pytest.mark.parametrize("length", [1, 70])
def test_rows_of_channels_may_lie_apart(name: str, length: int) -> None:
    form = FORMS[name]
    given = problem(form, (length, 2, 2, 16, 16))
    turned = [x.detach().mT.contiguous().mT if x.dim() > 2 else x.detach() for x in given]
    outs, wanted = triton_op.run(turned, form.text), definition(form, [x.detach() for x in given])
    torch.testing.assert_close(outs, wanted, rtol=1e-4, atol=1e-5)


def test_nothing_of_a_row_reaches_another() -> None:
    form = FORMS["delta"]
    given = [x.detach() for x in problem(form, (70, 2, 2, 16, 16))]
    spoiled = [x.clone() for x in given]
    for x in spoiled:
        x[1] = math.nan
    out, last = triton_op.run(spoiled, form.text)
    wanted = triton_op.run(given, form.text)
    assert torch.equal(out[0], wanted[0][0])
    assert torch.equal(last[0], wanted[1][0])
    assert bool(out[1].isnan().any())
