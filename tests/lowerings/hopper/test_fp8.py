from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler import Fp8Recipe
from attn_compiler.index_expr import Const, Index, Load, add
from attn_compiler.lowerings.base import FP8
from attn_compiler.lowerings.hopper import fp8 as hopper
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.spec import masks
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, make_spec

H200 = Target.fake(sm=90)


def asked(**given: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {
        "mask": CAUSAL,
        "head_dim": 128,
        "seqlen_q": 8192,
        "seqlen_kv": 8192,
        "needs_grad": False,
    } | given
    return dataclasses.replace(make_spec(**sizes), fp8=Fp8Recipe())


def test_it_is_first_where_its_kernel_runs() -> None:
    assert select.decide(asked(), H200, Options()).lowering == "hopper_fp8"
    assert select.decide(asked(head_dim=64), H200, Options()).lowering == "hopper_fp8"
    assert select.decide(dataclasses.replace(asked(), fp8=None), H200, Options()).lowering not in FP8


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        (Target.fake(sm=100), "the kernel is made of the instructions of sm90"),
        (Target.fake(sm=89), "the kernel is made of the instructions of sm90"),
        (Target.fake(triton="3.5.1"), "Triton 3.6 or newer is installed"),
        (Target.fake(triton="3.10.0"), "the kernel was compiled with Triton 3.6, 3.7, 3.8 or 3.9"),
    ],
    ids=["sm100", "sm89", "Triton 3.5", "Triton 3.10"],
)
def test_elsewhere_it_is_refused_with_the_reason(target: Target, rule: str) -> None:
    (reason,) = hopper.HopperFp8().why_not(asked(), target)
    assert reason.rule == rule


def proved(*kinds: masks.MaskKind) -> masks.MaskSpec:
    dense = masks.Dense(shape=(1, 1, 8192, 1), dtype="bool")
    return masks.MaskSpec(kinds=kinds, dense=dense)


BANDS = {
    "from the end": masks.MaskSpec(
        kinds=(masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT),), flag=masks.Flag.CALLED
    ),
    "causal window": proved(masks.Causal(), masks.SlidingWindow(left=1023, right=None)),
    "both sides": proved(masks.SlidingWindow(left=512, right=512)),
    "offset": proved(masks.CausalFrom(offset=Const(100))),
}


@pytest.mark.parametrize("mask", BANDS.values(), ids=BANDS.keys())
def test_every_band_is_one_that_its_kernel_knows(mask: masks.MaskSpec) -> None:
    for seqlen_kv in (8192, 16384):
        spec = asked(mask=mask, seqlen_kv=seqlen_kv)
        assert parts.make_plan(spec).band is not None
        assert not hopper.HopperFp8().why_not(spec, H200)


LENGTHS = masks.KeyBound(side="last", bound=add(Load("lengths", (Index("b"),), "int"), Const(-1)))


@pytest.mark.parametrize("kinds", [(LENGTHS,), (masks.Causal(), LENGTHS)], ids=["full", "causal"])
def test_it_knows_batch_rows_with_numbers_of_keys(kinds: tuple[masks.MaskKind, ...]) -> None:
    assert not hopper.HopperFp8().why_not(asked(mask=proved(*kinds)), H200)
    first = masks.KeyBound(side="first", bound=Load("first", (Index("b"),), "int"))
    (reason,) = hopper.HopperFp8().why_not(asked(mask=proved(*kinds, first)), H200)
    assert "rows" in reason.observed


def test_documents_keep_their_dtype() -> None:
    mask = proved(masks.Causal(), masks.Document(of_key=Load("ids", (Index("b"), Index("k")), "int")))
    (reason,) = hopper.HopperFp8().why_not(asked(mask=mask), H200)
    assert "documents_q" in reason.observed
    assert select.decide(asked(mask=mask), H200, Options()).lowering not in FP8


def test_wide_heads_keep_their_dtype() -> None:
    forced = dataclasses.replace(asked(head_dim=256), fp8=Fp8Recipe(force=True))
    decision = select.decide(forced, H200, Options())
    assert decision.lowering not in FP8
    refused = {refusal.lowering: refusal.reasons for refusal in decision.refusals}
    assert "128" in refused["hopper_fp8"][0].rule


def test_cudnn_differentiates_what_it_can() -> None:
    assert hopper.backward_of(asked(), H200) == "sdpa_cudnn"
    assert hopper.backward_of(asked(mask=masks.MaskSpec()), H200) == "sdpa_cudnn"
    assert hopper.backward_of(asked(), Target.fake(sm=90, disabled=frozenset({"cudnn"}))) == "triton"
    assert hopper.backward_of(asked(changes=(Softcap(cap=30.0),)), H200) == "triton"


def test_short_lengths_keep_their_dtype() -> None:
    decision = select.decide(asked(seqlen_q=2048, seqlen_kv=2048), H200, Options())
    assert decision.lowering not in FP8
    assert "hopper_fp8" in {refusal.lowering for refusal in decision.refusals}
