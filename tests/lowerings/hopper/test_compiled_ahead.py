"""Nothing that a call launches is compiled by the call."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tests.lowerings.hopper import any_size, compiled_ahead
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by


@pytest.mark.further
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
    assert found["forward, bias"]["begun"] == ["attention_forward_sm90"]
    # Those that come after are the same as the other backward's, which were begun for that.
    own = ["attention_before_backward", "attention_ranks", "attention_backward_sm90"]
    assert found["in order"]["begun"] == own
    assert not [each for call in found.values() for each in call["left"]]


@pytest.mark.further
@of_a_known_compiler
def test_calls_of_50_lengths_want_two_variants_of_each_kernel() -> None:
    """One for multiples of 16, one for other lengths. Both are compiled with the graph of symbolic sizes."""
    (found,) = printed_by(any_size)
    assert list(found) == [case.name for case in any_size.CASES]
    for case in found.values():
        assert {"attention_forward_sm90", "attention_backward_sm90"} <= set(case["variants"])
        assert set(case["variants"].values()) <= {1, 2}
        assert case["late"] == []
