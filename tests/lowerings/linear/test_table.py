"""Which lowering a call of linear attention gets: by the rows, or by what the user names."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings.base import UNTOUCHED
from attn_compiler.lowerings.linear import table
from attn_compiler.lowerings.linear.table import LINEAR_LOWERINGS, ROWS
from attn_compiler.reasons.codes import Code
from attn_compiler.spec.linear import LinearForm
from attn_compiler.spec.target import Target
from tests.lowerings.linear import linear_forms

_CPU, _GPU = Target.fake(device="cpu"), Target.fake(sm=90)


def test_a_row_names_lowerings_that_there_are() -> None:
    known = {lowering.name for lowering in LINEAR_LOWERINGS}
    assert all(set(row.order) <= known for row in ROWS)
    assert all(row.since.startswith("20") and row.why for row in ROWS)


@pytest.mark.parametrize("target", [Target.fake(sm=80), Target.fake(sm=100), _GPU])
def test_nothing_is_chosen_where_nothing_was_measured(target: Target) -> None:
    decision = table.decide(linear_forms.spec(device="cuda"), target, None)
    (refusal,) = decision.refusals
    assert decision.lowering == UNTOUCHED
    assert refusal.reasons[0].code == Code.OWN_IS_FASTEST
    assert "GPU" in refusal.reasons[0].observed
    assert "linear_reference" in str(refusal.reasons[0].remedy)


_LAYER: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "head_dim_k": 128, "head_dim_v": 128, "length": 2048}


_EACH = [linear_forms.DELTA, linear_forms.CHANNEL, linear_forms.STATE_SPACE]


@pytest.mark.parametrize("form", _EACH)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_on_hopper_long_calls_are_our_kernels(form: LinearForm, needs_grad: bool) -> None:
    spec = linear_forms.spec(form, **_LAYER, needs_grad=needs_grad)
    assert table.decide(spec, _GPU, None).lowering == "linear_triton"
    without = Target.fake(ptxas="12.8", without_wgmma=True)
    assert table.decide(spec, without, None).lowering == "linear_triton"
    old = table.decide(spec, Target.fake(ptxas="12.8"), None)
    assert (old.lowering, old.refusals[0].reasons[0].code) == (UNTOUCHED, Code.KNOWN_BUG)


@pytest.mark.parametrize(
    "changed",
    [
        {"length": 1},
        {"length": 2047},
        {"length": "s0"},
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"head_dim_v": 192},
        {"head_dim_k": 256},
    ],
)
def test_on_hopper_what_was_not_measured_to_be_faster_stays(changed: dict[str, Any]) -> None:
    for form in _EACH:
        assert table.decide(linear_forms.spec(form, **{**_LAYER, **changed}), _GPU, None).lowering == UNTOUCHED


@pytest.mark.parametrize("form", _EACH)
def test_on_hopper_a_step_of_many_rows_is_our_kernel(form: LinearForm) -> None:
    step = {**_LAYER, "length": 1}
    # A step has no products, so an older assembler makes it, too.
    for target in (_GPU, Target.fake(ptxas="12.8")):
        assert table.decide(linear_forms.spec(form, **step, batch=64), target, None).lowering == "linear_triton"
    for changed in (
        {"batch": 63},
        {"batch": "s0"},
        {"batch": 64, "needs_grad": True},
        {"batch": 64, "dtype": "float16"},
    ):
        assert table.decide(linear_forms.spec(form, **{**step, **changed}), _GPU, None).lowering == UNTOUCHED


def test_what_the_user_names_is_taken_everywhere() -> None:
    for target in (_CPU, _GPU):
        spec = linear_forms.spec(device=target.device)
        assert table.decide(spec, target, ("linear_reference",)).lowering == "linear_reference"
        assert table.decide(spec, target, (UNTOUCHED, "linear_reference")).lowering == UNTOUCHED


def test_a_machine_that_no_row_knows_keeps_the_model_own_function() -> None:
    target = Target.fake(device="xpu")
    assert table.row_of(linear_forms.spec(device="xpu"), target) is None
    assert table.decide(linear_forms.spec(device="xpu"), target, None).lowering == UNTOUCHED


@pytest.mark.parametrize(
    ("form", "changed", "lowering"),
    [
        (linear_forms.DELTA, {"length": 1}, "linear_reference"),
        (linear_forms.DELTA, {"length": 64}, "linear_reference"),
        (linear_forms.DELTA, {"length": 512}, UNTOUCHED),
        (linear_forms.DELTA, {"length": 2048, "needs_grad": True}, "linear_reference"),
        (linear_forms.DELTA, {"length": 64, "needs_grad": True}, UNTOUCHED),
        (linear_forms.DELTA, {"length": "s0", "needs_grad": True}, "linear_reference"),
        (linear_forms.CHANNEL, {"length": 512, "needs_grad": True}, "linear_reference"),
        (linear_forms.STATE_SPACE, {"length": 64, "needs_grad": True}, "linear_reference"),
        (linear_forms.STATE_SPACE, {"length": 1}, UNTOUCHED),
    ],
)
def test_on_a_cpu_the_choice_follows_what_was_measured(
    form: LinearForm, changed: dict[str, Any], lowering: str
) -> None:
    assert table.decide(linear_forms.spec(form, **changed), _CPU, None).lowering == lowering
