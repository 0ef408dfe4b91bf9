"""Biases of vision models' lengths: which lowering is asked first on an H200."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings.choice import priorities
from attn_compiler.lowerings.choice.priorities import order, row_of
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.target import Target
from tests.lowerings.specs import bias, make_spec


def of_bias(seqlen: int, *, learned: bool = False, **given: Any) -> Any:
    added = bias(1, 8, seqlen, seqlen, requires_grad=learned)
    sizes: dict[str, Any] = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "head_dim": 64, "mask": MaskSpec()}
    return make_spec(**sizes | {"needs_grad": learned, "changes": (added,)} | given)


@pytest.mark.parametrize(
    ("seqlen", "learned", "first"),
    [
        (49, False, "triton"),
        (144, False, "sdpa_cudnn"),
        (197, False, "triton"),
        (257, True, "cudnn"),
        (577, True, "cudnn"),
        (49, True, "sdpa_cudnn"),
        (1200, True, "hopper"),
    ],
)
def test_by_length(seqlen: int, learned: bool, first: str) -> None:
    assert order(of_bias(seqlen, learned=learned), Target.fake(sm=90))[0] == first


def test_only_what_was_measured_has_these_rows() -> None:
    for spec, sm in (
        (of_bias(197), 80),
        (of_bias(197, head_dim=128), 90),
        (of_bias(197, dtype="float32"), 90),
        (of_bias(577, needs_grad=True), 90),
    ):
        assert row_of(spec, Target.fake(sm=sm)) not in priorities.group("bias")
