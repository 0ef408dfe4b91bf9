"""Nothing that a call launches is compiled by the call."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.lowerings.hopper import compiled_ahead
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by


@of_a_known_compiler
def test_all_kernels_are_compiled_before_they_are_launched() -> None:
    found = {each["name"]: each for each in printed_by(compiled_ahead)}
    assert found["forward"]["begun"] == ["attention_forward_sm90", "attention_again"]
    assert found["backward"]["begun"] == [
        "attention_before_backward",
        "attention_backward_sm90",
        "attention_after_backward",
        "attention_sum_groups",
        "attention_grad_q",
        "attention_grad_kv",
    ]
    assert not found["forward"]["left"] + found["backward"]["left"]
