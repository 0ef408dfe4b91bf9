"""What cuDNN is to build, as text, and from which operands."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Expr, Index, Load
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.cudnn import operands as cudnn_operands, plan
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.spec import masks
from attn_compiler.spec.added_scores import Alibi
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import ScoreSpec, Sinks
from tests.lowerings.emitting import GraphEmitter
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, bias, make_spec
from tests.spec.meanings import Inputs, allows

B, K = Index("b"), Index("k")
LENGTH: Expr = ix.add(Load("lengths", (B,), "int"), Const(-1))
VECTOR = masks.KeyPadding(condition=Load("mask", (B, K), "bool"))


def proved(*kinds: masks.MaskKind, dtype: str = "bool", **changes: Any) -> AttentionSpec:
    """A dense mask that was shown to be the kinds."""
    sizes = {"seqlen_q": 40, "seqlen_kv": 40, **changes}
    shape = (1, 1, sizes["seqlen_q"], sizes["seqlen_kv"])
    return make_spec(mask=masks.MaskSpec(kinds=kinds, dense=masks.Dense(shape=shape, dtype=dtype)), **sizes)


def call_of(spec: AttentionSpec, *, deterministic: bool = False) -> CudnnCall:
    assert plan.reasons(spec) == []
    return plan.call_of(spec, deterministic=deterministic)


@pytest.mark.parametrize(
    "call",
    [
        CudnnCall(scale=0.125),
        CudnnCall(scale=1 / 3, left=5, right=0, from_end=True, needs_grad=True),
        CudnnCall(scale=0.1, lengths=True, bias=True, bias_grad=True, sinks=True, sinks_grad=True, dropout_p=0.125),
        CudnnCall(scale=0.1, needs_grad=True, deterministic=True),
    ],
)
def test_text_and_back(call: CudnnCall) -> None:
    assert CudnnCall.from_text(call.to_text()) == call
    assert CudnnCall.from_text(call.to_text()) is CudnnCall.from_text(call.to_text())


def test_text_says_only_what_is_not_as_usual() -> None:
    assert CudnnCall(scale=0.5, right=0).to_text() == '{"kind":"CudnnCall","right":0,"scale":0.5}'


def test_operands_stand_in_a_fixed_order() -> None:
    call = CudnnCall(scale=1.0, bias=True, bias_grad=True, sinks=True, lengths=True, dropout_p=0.5)
    assert call.operands == ("bias", "sinks", "lengths_q", "lengths", "seed", "offset")
    assert call.differentiable == ("bias",)


@pytest.mark.parametrize("seqlens", [(40, 40), (17, 40), (1, 40), (40, 17)])
@pytest.mark.parametrize(
    "kinds",
    [
        (masks.Causal(),),
        (masks.Causal(alignment=masks.Alignment.BOTTOM_RIGHT),),
        (masks.Causal(), masks.SlidingWindow(left=7, right=None)),
        (masks.SlidingWindow(left=7, right=3),),
        (masks.SlidingWindow(left=0, right=None),),
        (masks.SlidingWindow(left=1000, right=None), masks.Causal()),
        (masks.CausalFrom(offset=Const(5)),),
        (masks.CausalFrom(offset=Const(1000)),),
    ],
)
def test_a_band_allows_what_the_kinds_allow(kinds: tuple[masks.MaskKind, ...], seqlens: tuple[int, int]) -> None:
    queries, keys = seqlens
    call = call_of(proved(*kinds, seqlen_q=queries, seqlen_kv=keys))
    inputs = Inputs(seqlen_q=queries, seqlen_kv=keys)
    for q in range(queries):
        position = q + (keys - queries if call.from_end else 0)
        for k in range(keys):
            inside = (call.left is None or k >= position - call.left) and (
                call.right is None or k <= position + call.right
            )
            assert inside == all(allows(kind, 0, 0, q, k, inputs) for kind in kinds), (q, k, call)
    assert call.operands == ()


def test_sides_that_say_nothing_are_open() -> None:
    assert call_of(proved(masks.SlidingWindow(left=39, right=39))) == CudnnCall(scale=0.125, needs_grad=True)
    assert call_of(make_spec(mask=BOTTOM_RIGHT)) == CudnnCall(scale=0.125, right=0, needs_grad=True)
    assert call_of(make_spec(mask=BOTTOM_RIGHT, seqlen_q=1, needs_grad=False)) == CudnnCall(scale=0.125)


def test_lengths_are_the_keys_that_a_row_has() -> None:
    spec = proved(masks.KeyBound(side="last", bound=LENGTH))
    assert call_of(spec).operands == ("lengths_q", "lengths")
    assert plan.length(spec) == Load("lengths", (B,), "int")
    both = proved(masks.KeyBound(side="last", bound=LENGTH), masks.Causal())
    assert (call_of(both).lengths, call_of(both).right) == (True, 0)


def test_a_bound_that_all_rows_share_is_a_length_too() -> None:
    spec = proved(masks.KeyBound(side="last", bound=Load("filled", (), "int")))
    assert call_of(spec).lengths
    assert plan.length(spec) == ix.add(Load("filled", (), "int"), Const(1))


@pytest.mark.parametrize(
    ("kind", "observed"),
    [
        (VECTOR, "truth values of keys, which may be padded at the left or have holes"),
        (
            masks.KeyBound(side="first", bound=LENGTH),
            "an interval of keys that differs by query, or begins after the first key",
        ),
        (masks.Prefix(length=LENGTH), "an interval of keys that differs by query"),
        (masks.CausalFrom(offset=Load("past", (), "int")), "an interval of keys that differs by query"),
        (masks.Chunked(size=16), "an interval of keys that differs by query"),
        (masks.Document(of_key=Load("ids", (B, K), "int")), "documents"),
    ],
)
def test_what_is_no_part_of_cudnn_is_refused(kind: masks.MaskKind, observed: str) -> None:
    (reason,) = plan.reasons(proved(kind, masks.Causal()))
    assert observed in reason.observed


def test_a_vector_of_truth_values_is_told_what_would_help() -> None:
    (reason,) = plan.reasons(proved(VECTOR))
    assert reason.remedy is not None
    assert "make the mask of lengths" in reason.remedy


def test_an_unread_bool_mask_is_refused_and_an_added_one_is_added() -> None:
    def unread(dtype: str) -> AttentionSpec:
        mask = masks.MaskSpec(
            kinds=(masks.Causal(),),
            flag=masks.Flag.CALLED,
            dense=masks.Dense(shape=(1, 1, 128, 128), dtype=dtype),
            reason="who knows",
        )
        return make_spec(mask=mask)

    (reason,) = plan.reasons(unread("bool"))
    assert reason.observed == "a mask tensor of truth values"
    call = call_of(unread("bfloat16"))
    assert (call.bias, call.bias_grad, call.right) == (True, False, 0)


def test_a_tensor_that_only_masks_is_not_added() -> None:
    (reason,) = plan.reasons(proved(VECTOR, masks.Causal(), dtype="bfloat16"))
    assert "truth values of keys" in reason.observed


@pytest.mark.parametrize("further", [(), (VECTOR,)])
def test_slopes_are_added_as_the_models_own_tensor(further: tuple[masks.MaskKind, ...]) -> None:
    """Its diagonal and its padding are in the tensor; nothing is left out, and nothing is applied twice."""
    alibi = Alibi(slopes=Load("slopes", (Index("h"),), "float"), position=ix.add(K, Index("q"), -1))
    mask = masks.MaskSpec(kinds=(masks.Causal(), *further), dense=masks.Dense(shape=(1, 8, 128, 128), dtype="bfloat16"))
    spec = make_spec(mask=mask)
    spec = AttentionSpec(
        **{f: getattr(spec, f) for f in ("q", "k", "v", "mask", "device", "out_dtype", "needs_grad")},
        score=ScoreSpec(scale=0.125, proved=(alibi,)),
    )
    assert call_of(spec) == CudnnCall(scale=0.125, bias=True, needs_grad=True)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_gradients_are_for_what_wants_one(needs_grad: bool) -> None:
    spec = make_spec(changes=(bias(1, 8, 128, 128), Sinks(requires_grad=True)), needs_grad=needs_grad)
    call = call_of(spec, deterministic=True)
    assert (call.bias_grad, call.sinks_grad, call.needs_grad, call.deterministic) == (needs_grad,) * 4
    frozen = make_spec(changes=(bias(1, 8, 128, 128, requires_grad=False), Sinks(requires_grad=False)))
    assert (call_of(frozen).bias_grad, call_of(frozen).sinks_grad) == (False, False)


def test_a_plain_causal_mask_needs_no_tensor() -> None:
    assert call_of(make_spec(mask=CAUSAL, dropout_p=0.125)) == CudnnCall(
        scale=0.125, right=0, dropout_p=0.125, needs_grad=True
    )


BATCH, HEADS, SEQLEN = 3, 4, 16


def run(
    call: CudnnCall, spec: AttentionSpec, *, loads: dict[str, torch.Tensor] | None = None, **given: torch.Tensor
) -> Any:
    """The operands' values for real tensors, and the emitter's graph."""
    loads = loads or {}
    q = torch.zeros(BATCH, HEADS, SEQLEN, 32, dtype=torch.bfloat16)
    tensors = {"q": q, "k": q, "v": q, **given, **loads}
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = {name: graph.placeholder(name) for name in tensors}
    for name, node in nodes.items():
        node.meta["example_value"] = mode.from_tensor(tensors[name], static_shapes=True)
    operands = Operands(
        q=nodes["q"],
        k=nodes["k"],
        v=nodes["v"],
        mask=nodes.get("mask"),
        sinks=nodes.get("sinks"),
        loads={name: nodes[name] for name in loads},
    )
    emitter = GraphEmitter(graph)
    with mode:
        made = cudnn_operands.emit(emitter, call, spec, operands)
        again = cudnn_operands.emit(emitter, call, spec, operands)
    graph.output((made, again))
    values, twice = fx.GraphModule(torch.nn.Module(), graph)(*tensors.values())
    return dict(zip(call.operands, values, strict=True)), made, again, twice


def padded(bound: Any) -> AttentionSpec:
    kind = masks.KeyBound(side="last", bound=bound)
    mask = masks.MaskSpec(kinds=(kind,), dense=masks.Dense(shape=(BATCH, 1, 1, SEQLEN), dtype="bool"))
    return make_spec(batch=BATCH, heads=HEADS, heads_kv=HEADS, seqlen_q=SEQLEN, seqlen_kv=SEQLEN, mask=mask)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_are_counted_and_kept_within_what_there_is(dtype: torch.dtype) -> None:
    spec = padded(ix.add(Load("lengths", (Index("b"),), "int"), Const(-1)))
    call = plan.call_of(spec, deterministic=False)
    values, made, again, _ = run(call, spec, loads={"lengths": torch.tensor([5, -2, 99], dtype=dtype)})
    assert values["lengths"].tolist() == [5, 0, SEQLEN]
    assert values["lengths_q"].tolist() == [SEQLEN] * BATCH
    assert values["lengths"].dtype == values["lengths_q"].dtype == torch.int32
    assert values["lengths"].is_contiguous()
    assert made == again, "what every layer needs is made once"


def test_a_length_that_all_rows_share() -> None:
    spec = padded(Load("filled", (), "int"))
    call = plan.call_of(spec, deterministic=False)
    values, *_ = run(call, spec, loads={"filled": torch.tensor(6)})
    assert values["lengths"].tolist() == [7] * BATCH
    assert values["lengths"].is_contiguous()


def test_all_keys_where_they_are_only_counted() -> None:
    call = CudnnCall(scale=1.0, lengths=True, counted=True)
    values, made, again, _ = run(call, make_spec())
    assert values["lengths"].tolist() == values["lengths_q"].tolist() == [SEQLEN] * BATCH
    assert made == again


def test_sinks_are_read_in_float32() -> None:
    call = CudnnCall(scale=1.0, sinks=True)
    values, *_ = run(call, make_spec(), sinks=torch.arange(8, dtype=torch.bfloat16)[::2])
    assert values["sinks"].dtype == torch.float32
    assert values["sinks"].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert values["sinks"].is_contiguous()


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (torch.randn(SEQLEN, SEQLEN), (1, 1, SEQLEN, SEQLEN)),
        (torch.randn(1, 1, SEQLEN, SEQLEN).expand(BATCH, 1, SEQLEN, SEQLEN), (BATCH, 1, SEQLEN, SEQLEN)),
        (torch.randn(BATCH, 1, 1, SEQLEN).to(torch.bfloat16), (BATCH, 1, 1, SEQLEN)),
        (torch.randn(BATCH, 1, SEQLEN, 1), (BATCH, 1, SEQLEN, SEQLEN)),
        (torch.randn(1, HEADS, SEQLEN, SEQLEN).transpose(2, 3), (1, HEADS, SEQLEN, SEQLEN)),
    ],
)
def test_a_bias_has_four_axes_all_keys_and_no_gaps(mask: torch.Tensor, shape: tuple[int, ...]) -> None:
    spec = make_spec(batch=BATCH, heads=HEADS, heads_kv=HEADS, seqlen_q=SEQLEN, seqlen_kv=SEQLEN)
    values, *_ = run(CudnnCall(scale=1.0, bias=True), spec, mask=mask)
    bias = values["bias"]
    assert (tuple(bias.shape), bias.dtype, bias.is_contiguous()) == (shape, torch.bfloat16, True)
    torch.testing.assert_close(bias, mask.to(torch.bfloat16).expand(shape))


def test_a_bias_that_begins_between_two_vectors_is_copied() -> None:
    spec = make_spec(batch=1, heads=1, heads_kv=1, seqlen_q=8, seqlen_kv=16)
    mask = torch.randn(1 + 8 * 16).bfloat16()[1:].view(1, 1, 8, 16)
    values, *_ = run(CudnnCall(scale=1.0, bias=True), spec, mask=mask)
    assert values["bias"].data_ptr() != mask.data_ptr()
    assert torch.equal(values["bias"], mask)


def test_each_call_draws_a_seed_of_its_own() -> None:
    call = CudnnCall(scale=1.0, dropout_p=0.5)
    values, made, again, twice = run(call, make_spec())
    assert values["seed"].dtype == values["offset"].dtype == torch.int64
    assert (tuple(values["seed"].shape), values["offset"].tolist()) == ((1,), [0])
    assert values["seed"].tolist() != twice[0].tolist()
    assert made[0] is not again[0]
    assert made[1] is again[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (CudnnCall(scale=1.0, bias=True), "the call needs a tensor to add"),
        (CudnnCall(scale=1.0, sinks=True), "the call needs sinks"),
        (CudnnCall(scale=1.0, lengths=True), "the call needs lengths"),
    ],
)
def test_what_the_site_does_not_have(call: CudnnCall, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(call, dataclasses.replace(make_spec()))
