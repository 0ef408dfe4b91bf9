"""What the kernels for Hopper take is a part of what our Triton kernels do, and what they leave those take, as their remedy says."""

from __future__ import annotations

from typing import Any

import pytest

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.hopper.takes import TAKES
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.parts.site_parts import ADDED, MASKING
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Dense, Document, KeyPadding, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec, words

B, K = Index("b"), Index("k")
KEPT = KeyPadding(condition=ix.as_bool(Load("kept", (B, K), "int")))
IDS = Document(of_key=Load("ids", (B, K), "int"))
TENSOR = Dense(shape=(2, 1, 4096, 4096), dtype="bool")


def asked(**given: Any) -> AttentionSpec:
    return make_spec(**{"seqlen_q": 4096, "seqlen_kv": 4096, **given})


def proved(*kinds: Any) -> MaskSpec:
    return MaskSpec(kinds=kinds, dense=TENSOR)


def test_they_take_a_part_of_what_our_kernels_do() -> None:
    more = kernel_limits.TAKES
    assert set(TAKES.dtypes) <= set(more.dtypes)
    assert set(TAKES.changes) <= set(more.changes)
    assert TAKES.parts <= more.parts == MASKING | ADDED
    assert TAKES.sms == ((90, 90),)
    assert TAKES.head_dims is not None
    assert more.head_dims is not None
    assert (TAKES.head_dims.most or 0) <= (more.head_dims.most or 0)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"mask": CAUSAL}, {"band"}),
        ({"mask": proved(SlidingWindow(left=512, right=512))}, {"band"}),
        ({"mask": proved(KEPT)}, {"keys"}),
        ({"mask": proved(IDS)}, {"documents"}),
        ({"changes": (Softcap(cap=30.0), Sinks(requires_grad=True))}, set()),
        ({"head_dim": 256, "dtype": "float16"}, set()),
    ],
)
def test_what_both_take(given: dict[str, Any], parts: set[str]) -> None:
    spec = asked(**given)
    assert kernel_limits.TAKES.parts >= parts <= TAKES.parts
    assert TAKES.beyond(spec) == set()
    for name in ("hopper", "triton"):
        assert words(by_name(name).why_not(spec, Target.fake())) == "", name


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ({"dtype": "float32"}, Target.fake()),
        ({"head_dim_v": 68, "head_dim": 64, "dtype": "float32"}, Target.fake()),
        ({"scale": -1.0}, Target.fake()),
        ({"dropout_p": 0.1}, Target.fake()),
        ({}, Target.fake(sm=80)),
        ({}, Target.fake(sm=100)),
    ],
)
def test_what_they_leave_our_triton_kernels_take(given: dict[str, Any], target: Target) -> None:
    spec = asked(**given)
    assert words(by_name("hopper").why_not(spec, target)) != ""
    assert words(by_name("triton").why_not(spec, target)) == ""


@pytest.mark.parametrize(
    "given", [{"mask": dense(1, 1, 4096, 4096)}, {"changes": (bias(1, 8, 4096, 4096),)}], ids=["mask", "bias"]
)
def test_tensors_are_left_to_our_triton_kernels_where_they_are_no_part_of_it(given: dict[str, Any]) -> None:
    spec = asked(**given)
    assert bool(by_name("hopper").why_not(spec, Target.fake())) == bool(TAKES.beyond(spec))
    assert words(by_name("triton").why_not(spec, Target.fake())) == ""
