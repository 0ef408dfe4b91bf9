"""Attention that leaves most of an H200 idle: which lowering is asked first there."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler.lowerings.choice import priorities
from attn_compiler.lowerings.choice.priorities import order, row_of
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, make_spec

H200 = Target.fake(sm=90)


def spec_of(batch: int, seqlen: int, heads: int, head_dim: int, *, heads_kv: int | None = None, **given: Any) -> Any:
    sizes = {"batch": batch, "heads": heads, "heads_kv": heads_kv or heads, "head_dim": head_dim}
    return make_spec(**sizes | {"seqlen_q": seqlen, "seqlen_kv": seqlen, "needs_grad": False} | given)


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (spec_of(4, 256, 16, 80), "triton"),
        (spec_of(1, 729, 24, 64), "triton"),
        # So little work that the host's time counts.
        (spec_of(1, 197, 12, 64), "sdpa_cudnn"),
        (spec_of(1, 257, 24, 64, needs_grad=True), "sdpa_cudnn"),
        (spec_of(32, 256, 20, 64), "sdpa_cudnn"),
        (spec_of(16, 256, 12, 128), "sdpa_cudnn"),
        (spec_of(4, 256, 12, 128), "triton"),
        (spec_of(1, 4262, 16, 32), "triton"),
        (spec_of(16, 257, 24, 64, needs_grad=True), "triton"),
        (spec_of(32, 230, 16, 72, needs_grad=True), "sdpa_cudnn"),
        (spec_of(8, 172, 8, 256, heads_kv=1, mask=CAUSAL), "triton"),
        (spec_of(4, 526, 24, 128, heads_kv=8, mask=CAUSAL), "hopper"),
        (spec_of(8, 2048, 16, 64, mask=CAUSAL), "sdpa_cudnn"),
        (spec_of(8, 2048, 12, 160, needs_grad=True), "sdpa_cudnn"),
    ],
    ids=str,
)
def test_by_work(spec: Any, first: str) -> None:
    assert order(spec, H200)[0] == first


def test_what_a_row_was_not_measured_for_has_another() -> None:
    for spec, target in (
        (spec_of(4, 256, 16, 80), Target.fake(sm=80)),
        (spec_of(4, 256, 16, 80, dtype="float32"), H200),
        (spec_of(4, 256, 16, 80, dropout_p=0.1), H200),
        (spec_of(4, 1, 16, 80), H200),
        (spec_of(4, 256, 16, "s1", mask=MaskSpec()), H200),  # type: ignore[arg-type]
        # Of an unknown batch it is not known that the work is little.
        (spec_of("s0", 729, 24, 64), H200),  # type: ignore[arg-type]
    ):
        assert row_of(spec, target) not in priorities.group("short")
