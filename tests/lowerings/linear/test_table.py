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


def test_nothing_is_chosen_where_nothing_was_measured() -> None:
    decision = table.decide(linear_forms.spec(device="cuda"), _GPU, None)
    (refusal,) = decision.refusals
    assert decision.lowering == UNTOUCHED
    assert refusal.reasons[0].code == Code.OWN_IS_FASTEST
    assert "GPU" in refusal.reasons[0].observed
    assert "linear_reference" in str(refusal.reasons[0].remedy)


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
