"""The FlashAttention-4 lowering without its kernels: what it takes, what it refuses and why, what it puts into the graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Index, Load
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.fa4.lowering import FlashAttention4
from attn_compiler.lowerings.fa4.plan import Fa4Call
from attn_compiler.spec import masks, scores
from attn_compiler.spec.masks import Causal, Dense, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests import numerics
from tests.lowerings import emitting
from tests.lowerings.fa4.cases import PROBLEMS, VERSION, Problem, inputs
from tests.lowerings.fa4.stand_in import StandIn, flash  # noqa: F401 - a fixture
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, UNLISTED, bias, dense, make_spec, words

H200 = Target.fake(flash_attn_4=VERSION)
B200 = Target.fake(sm=100, flash_attn_4=VERSION)
FA4 = FlashAttention4()
BY_NAME = {problem.name: problem for problem in PROBLEMS}


def why_not(spec_of: dict[str, Any], machine: Target = H200) -> str:
    return words(FA4.why_not(make_spec(**spec_of), machine))


def windowed(left: int | None, right: int | None, seqlen: int | str = 128) -> MaskSpec:
    window = SlidingWindow(left=left, right=right)
    return MaskSpec(kinds=(window,), dense=Dense(shape=(2, 1, seqlen, seqlen), dtype="bool"))


# ---- the machine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (H200, ""),
        (B200, ""),
        (Target.fake(sm=103, flash_attn_4=VERSION), ""),
        (Target.fake(sm=80, flash_attn_4=VERSION), "from sm90"),
        (Target.fake(sm=120, flash_attn_4=VERSION), "sm90 or sm100 to sm109; observed sm120"),
        (Target.fake(device="cpu", flash_attn_4=VERSION), "device cpu"),
        (Target.fake(), "observed none; pip install 'attn_compiler[fa4]'"),
        (Target.fake(flash_attn_4="4.0.0b33"), "observed 4.0.0b33"),
        (Target.fake(flash_attn_4="4.0.0b34"), ""),
        (Target.fake(flash_attn_4="4.0.0b37"), "4.0.0b34 to 4.0.0b36 is installed; observed 4.0.0b37"),
        (Target.fake(flash_attn_4="4.0.0"), "observed 4.0.0;"),
        (Target.fake(flash_attn_4=VERSION, mixed_gpus=True), "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_where_it_runs(machine: Target, said: str) -> None:
    reasons = words(FA4.unavailable(machine))
    assert said in reasons
    assert bool(reasons) is bool(said)
    assert words(FA4.why_not(make_spec(), machine)) == reasons


# ---- what it takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"dtype": "float16", "mask": CAUSAL},
        {"mask": CAUSAL, "seqlen_q": "s0", "seqlen_kv": "s0", "batch": "s1"},
        {"mask": BOTTOM_RIGHT, "seqlen_q": 64, "seqlen_kv": 128},
        {"mask": BOTTOM_RIGHT, "seqlen_q": "s0", "seqlen_kv": "s1"},
        {"seqlen_q": 64},
        {"heads_kv": 2, "mask": windowed(31, 0)},
        {"mask": windowed(31, 31)},
        {"changes": (Softcap(cap=30.0), Sinks(requires_grad=True)), "mask": windowed(31, None)},
        {"head_dim": 32},
        {"head_dim": 96, "head_dim_v": 64},
        {"head_dim": 72, "needs_grad": False},
        {"head_dim": 8, "needs_grad": False},
        {"head_dim": 256},
        {"head_dim": 192, "head_dim_v": 128},
        {"head_dim": 192, "head_dim_v": 128, "heads_kv": 2, "needs_grad": False},
    ],
)
def test_takes(spec: dict[str, Any]) -> None:
    assert why_not(spec) == ""


PADDED = MaskSpec(
    kinds=(Causal(), masks.KeyPadding(condition=ix.as_bool(Load("attention_mask", (Index("b"), Index("k")), "int")))),
    dense=Dense(shape=(2, 1, 128, 128), dtype="bool"),
)
DOCUMENTS = dataclasses.replace(PADDED, kinds=(masks.Document(of_key=Load("ids", (Index("b"), Index("k")), "int")),))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"dtype": "float32"}, "q is bfloat16 or float16"),
        ({"head_dim": 264}, "head_dim_qk is at most 256"),
        ({"head_dim": 36}, "head_dim_qk is a multiple of 8; observed 36; pad it with zeros to 40"),
        ({"head_dim": "s3"}, "head_dim_qk is known"),
        ({"head_dim": 96, "head_dim_v": 64, "heads_kv": 2}, "with gradients and fewer heads of k and v, one head_dim"),
        (
            {"head_dim": 72},
            "head dims are multiples of 32: dQ is wrong (https://github.com/Dao-AILab/flash-attention/pull/2896)",
        ),
        ({"head_dim": 96, "head_dim_v": 80}, "observed flash-attn-4 4.0.0b36 on sm90, head_dim_qk 96, head_dim_v 80"),
        ({"returns_weights": True}, "no other reader"),
        ({"softmax_dtype": "float64"}, "at most float32"),
        ({"scale": -1.0}, "the scale is positive"),
        ({"dropout_p": 0.1}, "no dropout; observed 0.1; set attention_dropout=0.0"),
        ({"changes": (scores.Unusual(what="a tanh twice"),)}, "a tanh twice"),
        ({"mask": UNLISTED}, "a new kind of mask"),
        ({"mask": dense(2, 1, 128, 128)}, "a causal one, a window, or none; observed dense bool[2, 1, 128, 128]"),
        ({"mask": dense(2, 1, 1, 128)}, "a causal one, a window, or none"),
        ({"mask": dense(2, 1, 128, 128, dtype="bfloat16")}, "nothing is added to the scores"),
        ({"mask": PADDED}, "a causal one, a window, or none; observed causal"),
        ({"mask": DOCUMENTS}, "a causal one, a window, or none; observed document"),
        ({"changes": (bias(1, 8, 128, 128),)}, "nothing is added to the scores; observed bias[1, 8, 128, 128]"),
        ({"mask": CAUSAL, "seqlen_q": 64}, "as many queries as keys, or a mask that is counted from the end"),
        ({"mask": CAUSAL, "seqlen_q": "s0"}, "mark the length static"),
        ({"mask": windowed(31, 0), "seqlen_q": 64}, "as many queries as keys"),
        ({"mask": windowed(31, -1)}, "a query may use its own position"),
        ({"heads": 8, "heads_kv": 3}, "multiple"),
        ({"device": "cpu"}, "q, k and v are on cuda"),
    ],
)
def test_refuses(spec: dict[str, Any], said: str) -> None:
    assert said in why_not(spec)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, ""),
        ({"head_dim": 192, "head_dim_v": 128}, ""),
        ({"head_dim": 160}, "head dims are at most 128, or (192, 128), or (256, 256)"),
        ({"head_dim": 256, "needs_grad": False}, ""),
        ({"head_dim": 256}, "with gradients, head dims are at most 192"),
    ],
)
def test_blackwell_has_fewer_head_dims(spec: dict[str, Any], said: str) -> None:
    assert said in why_not(spec, B200)
    assert bool(why_not(spec, B200)) is bool(said)
    assert not why_not(spec)


# ---- the graph ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window_gqa_sinks", "causal_bfloat16", "softcap_wide"])
def test_the_graph_is_the_attention_that_was_asked_for(name: str, flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME[name], device="cpu")
    module = emitting.emit(FA4, built)
    assert emitting.calls(module)[0] is torch.ops.attn_compiler.fa4.default
    given = emitting.arguments(built)
    numerics.assert_within_rule(numerics.with_gradients(lambda _: module(*given), built), built)


def test_the_decision_is_in_the_text() -> None:
    graph = torch.fx.Graph()
    target = dataclasses.replace(H200, deterministic=True)
    emitter = emitting.GraphEmitter(graph, target)
    built = inputs(Problem(name="", case=BY_NAME["causal_bfloat16"].case), device="cpu")
    nodes = {name: graph.placeholder(name) for name in "qkv"}
    for name, node in nodes.items():
        node.meta["example_value"] = getattr(built, name).detach().to("meta")
    out = FA4.emit(emitter, FA4.plan(built.spec, emitter.target), emitting.Operands(**nodes))
    call = Fa4Call.from_text(out.args[0].args[-1])  # type: ignore[union-attr, arg-type]
    assert call == Fa4Call(spec=built.spec, version=VERSION, sm=90, deterministic=True)


@pytest.mark.parametrize(("dtype", "casts"), [(torch.float64, 1), (torch.float32, 0), (torch.bfloat16, 0)])
def test_sinks_in_double_precision_are_cast(dtype: torch.dtype, casts: int) -> None:
    built = inputs(BY_NAME["sinks_full"], device="cpu")
    assert built.sinks is not None
    module = emitting.emit(FA4, dataclasses.replace(built, sinks=built.sinks.detach().to(dtype)))
    assert emitting.calls(module).count(torch.Tensor.to) == casts


def test_it_is_registered() -> None:
    assert isinstance(by_name("fa4"), FlashAttention4)
