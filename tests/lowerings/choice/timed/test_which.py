"""Sites that a measured row speaks for are not timed, nor those whose tensors nobody can stand in for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings.choice.timed import which
from attn_compiler.spec.added_scores import GatheredBias, RelativeBias
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import CausalFrom, Dense, KeyPadding, MaskSpec
from attn_compiler.spec.scores import ScoreSpec
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL

_B, _K = Index("b"), Index("k")
H200 = Target.fake(sm=90, cudnn=91900)


def spec_of(*, seqlen: int = 256, batch: int = 4, heads: int = 8, width: int = 80, **fields: Any) -> AttentionSpec:
    shape = (batch, heads, seqlen, width)
    strides = (heads * seqlen * width, seqlen * width, width, 1)
    tensor = TensorSpec(shape=shape, strides=strides, dtype=fields.pop("dtype", "bfloat16"))
    given = {"mask": MaskSpec(), "score": ScoreSpec(scale=0.1), "device": "cuda", "out_dtype": "bfloat16"}
    return AttentionSpec(q=tensor, k=tensor, v=tensor, **(given | fields))


def test_a_short_site_is_timed_and_the_first_lowering_comes_first() -> None:
    assert which.why_not(spec_of(), H200) is None
    found = which.lowerings_for(spec_of(), H200, "sdpa_cudnn")
    assert found == ("sdpa_cudnn", "triton", "sdpa_flash", "sdpa_efficient")


def test_more_work_is_worth_slow_compilers() -> None:
    found = which.lowerings_for(spec_of(batch=64, seqlen=729), H200, "sdpa_cudnn")
    assert set(found) >= {"hopper", "cudnn"}


def test_few_queries_ask_the_kernel_for_decoding() -> None:
    q = dataclasses.replace(spec_of().q, shape=(4, 8, 1, 80), strides=(640, 80, 80, 1))
    assert "decode" in which.lowerings_for(dataclasses.replace(spec_of(), q=q), H200, "sdpa_cudnn")


def test_a_row_that_was_measured_speaks_for_its_own_shapes() -> None:
    near = spec_of(seqlen=2048, batch=8, heads=16, width=128, mask=CAUSAL)
    assert which.why_not(near, H200) == "a row was measured near it"
    # Another head dim, few elements, and a machine that nothing was measured on.
    assert which.why_not(spec_of(seqlen=2048, batch=8, heads=16, width=112, mask=CAUSAL), H200) is None
    assert which.why_not(spec_of(seqlen=2048, batch=1, heads=2, width=128, mask=CAUSAL), H200) is None
    assert which.why_not(near, Target.fake(sm=80, cudnn=91900)) is None


_SYMBOLIC = dataclasses.replace(spec_of().q, shape=(4, 8, "s0", 80))
_TABLE = (Load("index", (Index("q"), _K), "int"), Index("h"))


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(dtype="float32"),
        spec_of(lse="read"),
        spec_of(returns_weights=True),
        spec_of(score=ScoreSpec(scale=0.1, dropout_p=0.1)),
        dataclasses.replace(spec_of(), q=_SYMBOLIC),
        spec_of(mask=MaskSpec(kinds=(CausalFrom(offset=Load("length", (), "int")),))),
        spec_of(mask=MaskSpec(kinds=(KeyPadding(condition=Load("m", (_B, _K), "bool")),), out_of_reach=("m",))),
        spec_of(mask=MaskSpec(dense=Dense(shape=(4, 1, 256, 256), dtype="bfloat16"), reason="no", own_rows="model")),
        spec_of(score=ScoreSpec(scale=0.1, proved=(GatheredBias(table="t", at=_TABLE, requires_grad=True),))),
        spec_of(
            score=ScoreSpec(scale=0.1, proved=(RelativeBias(table="t", at=(_K,), distance=_K, requires_grad=True),))
        ),
        spec_of(batch=512, heads=32, seqlen=1000),
    ],
    ids=str,
)
def test_what_is_not_timed(spec: AttentionSpec) -> None:
    assert which.why_not(spec, H200)
    assert which.lowerings_for(spec, H200, "triton") == ()


def test_nothing_is_timed_without_a_gpu_of_its_own() -> None:
    for target in (Target.fake(device="cpu"), Target.fake(packaged=True), Target.fake(triton_interpreted=True)):
        assert which.why_not(spec_of(), target) == "it runs on another machine, or without a GPU"
