"""Head dims above 256 get kernels of ours wherever these take them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler.lowerings.choice import evidence, priorities
from attn_compiler.lowerings.choice.rows import MOST_QUERIES
from attn_compiler.options.options import Options
from attn_compiler.passes.writing.select import decide
from attn_compiler.spec.attention import Dim
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import Sinks
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec

MACHINES = (80, 86, 89, 90, 100, 103, 120)


def chosen(sm: int, **given: Any) -> str:
    sizes: dict[str, Any] = {"head_dim": 512, "seqlen_q": 2048, "seqlen_kv": 2048, "mask": CAUSAL}
    return decide(make_spec(**sizes | given), Target.fake(sm=sm), Options()).lowering


@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("seqlen", [2048, "s0"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_prefill_and_training(sm: int, seqlen: Dim, needs_grad: bool) -> None:
    """Hopper has a kernel of its own for what was measured, and for sinks as for what has none."""
    sizes: dict[str, Any] = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "needs_grad": needs_grad}
    masks: tuple[MaskSpec, ...] = (CAUSAL, MaskSpec(), dense(2, 1, 1, seqlen))
    for mask in masks:
        for further in ({}, {"changes": (Sinks(requires_grad=False),)}, {"head_dim": 384}, {"head_dim": 320}):
            assert chosen(sm, mask=mask, **sizes, **further) == ("hopper" if sm == 90 else "triton")
        for left_out in ({"head_dim": 264}, {"dropout_p": 0.1}):
            assert chosen(sm, mask=mask, **sizes, **left_out) == "triton"
    if sm == 90:
        assert chosen(sm, mask=dense(2, 1, seqlen, seqlen), **sizes) == "triton"


@pytest.mark.parametrize("sm", MACHINES)
@pytest.mark.parametrize("seqlen_q", [1, MOST_QUERIES])
def test_decoding(sm: int, seqlen_q: int) -> None:
    sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_kv": "s0", "needs_grad": False}
    for mask in (MaskSpec(), dense(2, 1, 1, "s0")):
        assert chosen(sm, mask=mask, **sizes) == "decode"
    of_few = sizes | {"seqlen_q": MOST_QUERIES + 1, "seqlen_kv": 65536}
    assert chosen(sm, mask=MaskSpec(), **of_few) == ("hopper" if sm == 90 else "triton")


@pytest.mark.parametrize("sm", MACHINES)
def test_what_ours_refuse_is_left_to_pytorchs(sm: int) -> None:
    assert chosen(sm, changes=(bias(1, 8, 2048, 2048),), mask=MaskSpec(), needs_grad=True) == "sdpa_efficient"
    assert chosen(sm, head_dim=520) == "sdpa_efficient"
    assert chosen(sm, head_dim=512, dtype="float32") == "sdpa_efficient"


def test_head_dims_up_to_256_have_other_rows() -> None:
    for sm in MACHINES:
        for head_dim in (256, 264):
            row = priorities.row_of(make_spec(head_dim=head_dim, seqlen_q=2048, seqlen_kv=2048), Target.fake(sm=sm))
            assert (row in priorities.group("wide")) == (head_dim == 264)


def test_rows_say_whether_they_were_measured() -> None:
    for row in priorities.group("wide"):
        assert row.sms is not None
        assert row.measured == (row.sms == (90, 90))
        assert row.measured != row.why.endswith("not measured here")
    found = evidence.evidence(
        dataclasses.replace(make_spec(head_dim=512, seqlen_q=2048, seqlen_kv=2048)), Target.fake(sm=80)
    )
    assert found is not None
    assert not found.measured
