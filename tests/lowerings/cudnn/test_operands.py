from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_compiler import index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.cudnn import operands as cudnn_operands, plan
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Dense, KeyBound, MaskSpec
from tests.lowerings.emitting import GraphEmitter
from tests.lowerings.specs import make_spec

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
    kind = KeyBound(side="last", bound=bound)
    mask = MaskSpec(kinds=(kind,), dense=Dense(shape=(BATCH, 1, 1, SEQLEN), dtype="bool"))
    return make_spec(batch=BATCH, heads=HEADS, heads_kv=HEADS, seqlen_q=SEQLEN, seqlen_kv=SEQLEN, mask=mask)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_are_counted_and_kept_within_what_there_is(dtype: torch.dtype) -> None:
    spec = padded(ix.add(Load("lengths", (Index("b"),), "int"), Const(-1)))
    call = plan.of(spec, deterministic=False)
    values, made, again, _ = run(call, spec, loads={"lengths": torch.tensor([5, -2, 99], dtype=dtype)})
    assert values["lengths"].tolist() == [5, 0, SEQLEN]
    assert values["lengths_q"].tolist() == [SEQLEN] * BATCH
    assert values["lengths"].dtype == values["lengths_q"].dtype == torch.int32
    assert values["lengths"].is_contiguous()
    assert made == again, "what every layer needs is made once"


def test_a_length_that_all_rows_share() -> None:
    spec = padded(Load("filled", (), "int"))
    call = plan.of(spec, deterministic=False)
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
