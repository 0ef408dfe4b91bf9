"""Heads of more than 256 channels are refused with their sizes."""

from __future__ import annotations

from attn_compiler.lowerings.linear.heads import check_heads
from attn_compiler.reasons.codes import Code
from tests.lowerings.linear import linear_forms


def test_both_sizes_of_a_head_are_bounded() -> None:
    assert check_heads(linear_forms.spec(head_dim_k=256, head_dim_v=256)) == []
    for changed in ({"head_dim_k": 257}, {"head_dim_v": 257}):
        (reason,) = check_heads(linear_forms.spec(**changed))
        assert (reason.code, "257" in reason.observed) == (Code.HEAD_DIM, True)
