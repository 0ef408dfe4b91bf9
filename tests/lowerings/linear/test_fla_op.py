"""`fla` takes the delta rule in half precision where its package is known, and says why it does not take the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.lowerings.linear import table
from attn_compiler.lowerings.linear.fla_op import LinearFla
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.linear import LinearForm
from attn_compiler.spec.target import Target
from tests.lowerings.linear import linear_forms
from tests.lowerings.linear.triton_problems import problem

_TRITON = {"fla": "0.6.0", "triton": "3.7.1"}
_GPU = Target.fake(**_TRITON)  # type: ignore[arg-type]


def _half(form: LinearForm, dtype: str = "bfloat16") -> LinearForm:
    return dataclasses.replace(form, out_dtype=dtype)


def _codes(target: Target = _GPU, form: LinearForm = linear_forms.DELTA, **changed: Any) -> list[Code]:
    dtype = changed.pop("dtype", "bfloat16")
    spec = linear_forms.spec(_half(form, dtype), **{"device": target.device, "dtype": dtype, **changed})
    return [reason.code for reason in LinearFla().why_not(spec, target)]


@pytest.mark.parametrize("form", [linear_forms.DELTA, linear_forms.CHANNEL])
@pytest.mark.parametrize("sm", [80, 89, 90, 100])
def test_it_takes_the_delta_rule(form: LinearForm, sm: int) -> None:
    for changed in ({}, {"needs_grad": True}, {"length": "s0"}, {"length": 1}, {"dtype": "float16"}):
        assert _codes(Target.fake(sm=sm, **_TRITON), form, **changed) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (Target.fake(), Code.LIBRARY_MISSING),
        (Target.fake(fla="0.5.1"), Code.LIBRARY_VERSION),
        (Target.fake(fla="0.7.0"), Code.LIBRARY_VERSION),
        (Target.fake(fla="0.6.0", deterministic=True), Code.DETERMINISTIC),
        (Target.fake(fla="0.6.0", mixed_gpus=True), Code.SEVERAL_ARCHITECTURES),
        (Target.fake(fla="0.6.0", triton=""), Code.LIBRARY_MISSING),
        (Target.fake(fla="0.6.0", sm=75), Code.ARCHITECTURE),
        (Target.fake(device="cpu", triton_interpreted=True), Code.INTERPRETER),
        (Target.fake(device="cpu"), Code.DEVICE),
    ],
)
def test_a_machine_that_can_not_run_it_is_refused(target: Target, code: Code) -> None:
    assert _codes(target) == [code]


def test_what_it_has_not_is_refused_by_name() -> None:
    assert _codes(dtype="float32") == [Code.DTYPE]
    assert _codes(form=dataclasses.replace(linear_forms.DELTA, state_dtype="float64")) == [Code.DTYPE]
    assert _codes(form=linear_forms.STATE_SPACE) == [Code.DTYPE]
    assert _codes(head_dim_k=257) == [Code.HEAD_DIM]
    wide = linear_forms.spec(linear_forms.DELTA, device="cuda", dtype="bfloat16")
    (reason,) = LinearFla().why_not(wide, _GPU)
    assert reason.observed == "q bfloat16, result float32, state float32"


@pytest.mark.parametrize(
    ("triton", "is_refused"), [("3.6.0", True), ("3.7.0", True), ("3.7.0+git12", True), ("3.7.1", False)]
)
def test_what_it_refuses_to_train_itself_is_refused_before(triton: str, is_refused: bool) -> None:
    target = Target.fake(fla="0.6.0", triton=triton)
    assert _codes(target, needs_grad=True) == ([Code.KNOWN_BUG] if is_refused else [])
    assert _codes(target) == _codes(target, linear_forms.CHANNEL, needs_grad=True) == []
    assert _codes(dataclasses.replace(target, sm=80), needs_grad=True) == []


def test_it_is_taken_by_name_alone() -> None:
    assert all("fla" not in row.order for row in table.ROWS)
    spec = linear_forms.spec(_half(linear_forms.DELTA), device="cuda", dtype="bfloat16", length=4096)
    assert table.decide(spec, _GPU, ("fla",)).lowering == "fla"
    assert table.decide(spec, Target.fake(), ("fla",)).lowering == UNTOUCHED


@pytest.mark.parametrize("form", [linear_forms.DELTA, linear_forms.CHANNEL])
def test_the_inner_compiler_sees_a_leaf_op(form: LinearForm) -> None:
    op = LinearFla().op
    given = [x.detach().to("meta") for x in problem(form, (90, 2, 2, 16, 16))]
    traced = make_fx(lambda *x: op(list(x), form.text), tracing_mode="fake")(*given)
    called = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    assert {name for name in called if name.startswith("attn_compiler.")} == {"attn_compiler.fla_chunks.default"}


def test_gradients_are_of_what_was_given() -> None:
    """q and k are normalised before the op, and other dtypes made the op's."""
    form = _half(linear_forms.DELTA)
    given = problem(form, (20, 1, 2, 16, 16), dtypes={"q": torch.bfloat16, "state": torch.bfloat16})
    out, last = LinearFla().op([x.detach().to("meta") for x in given], form.text)
    assert (out.dtype, last.dtype, out.shape) == (torch.bfloat16, torch.float32, (2, 20, 2, 16))
