from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_compiler.lowerings.cudnn import frontend, graphs, launch, plans
from attn_compiler.lowerings.cudnn.graphs import BuiltPlan, Plans
from attn_compiler.lowerings.cudnn.lowering import CudnnAttention
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.lowerings.shared.calls import leaf_calls
from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import MaskSpec
from attn_compiler.spec.scores import ScoreSpec
from attn_compiler.spec.target import Target
from tests.lowerings.cudnn.recording_frontend import Frontend

CALL = CudnnCall(scale=0.125, right=0, needs_grad=True)
HERE = Target.fake(cudnn_frontend="1.22.1")
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BuiltPlan, list[int]]]:
    """What was executed; plans come from a recording frontend, and tensors of the CPU stand in for those of a GPU."""
    executed: list[tuple[BuiltPlan, list[int]]] = []
    monkeypatch.setattr(launch, "cudnn_version", lambda: 91900)
    monkeypatch.setattr(plans, "cudnn_version", lambda: 91900)
    monkeypatch.setattr(plans, "_is_here", lambda target: True)
    monkeypatch.setattr(replaying, "current_cuda_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    recording = Frontend()
    monkeypatch.setattr(frontend, "PLANS", Plans(lambda key: graphs.build(recording, key, lambda: 0.0)))

    def launcher(plan: BuiltPlan, device: torch.device, pick: Any) -> Any:
        return lambda tensors, addresses: executed.append((plan, list(pick(addresses))))

    monkeypatch.setattr(frontend, "launcher", launcher)
    return executed


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def bshd(batch: int, heads: int, seqlen: int, head_dim: int) -> torch.Tensor:
    return bf16(batch, seqlen, heads, head_dim).transpose(1, 2)


def given(call: CudnnCall = CALL) -> tuple[Three, list[torch.Tensor]]:
    operands = {
        "bias": bf16(1, 4, 16, 16),
        "sinks": torch.randn(4),
        "lengths_q": torch.full((2,), 16, dtype=torch.int32),
        "lengths": torch.tensor([3, 16], dtype=torch.int32),
        "seed": torch.tensor([1]),
        "offset": torch.tensor([0]),
    }
    return (bshd(2, 4, 16, 32), bshd(2, 2, 16, 32), bshd(2, 2, 16, 16)), [operands[name] for name in call.operands]


def backward(qkv: Three, operands: list[torch.Tensor], call: CudnnCall, grad_out: torch.Tensor | None = None) -> Any:
    out, lse = launch.forward(*qkv, operands, call.to_text())
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    return launch.gradients(grad_out, lse, *qkv, operands, out, lse, call.to_text())


def test_the_forward_hands_over_every_address(launches: list[tuple[BuiltPlan, list[int]]]) -> None:
    call = CudnnCall(scale=1.0, bias=True, sinks=True, lengths=True, dropout_p=0.125, needs_grad=True)
    (q, k, v), operands = given(call)
    out, lse = launch.forward(q, k, v, operands, call.to_text())
    ((plan, addresses),) = launches
    assert plan.order == ("q", "k", "v", "out", "lse", *call.operands)
    assert addresses == [t.data_ptr() for t in (q, k, v, out, lse, *operands)]
    assert (tuple(out.shape), tuple(lse.shape)) == ((2, 4, 16, 16), (2, 4, 16))
    assert out.transpose(1, 2).is_contiguous()


def test_without_gradients_no_statistics_are_asked_for(launches: list[tuple[BuiltPlan, list[int]]]) -> None:
    qkv, _ = given()
    launch.forward(*qkv, [], CudnnCall(scale=1.0).to_text())
    assert launches[0][0].order == ("q", "k", "v", "out")


def test_gradients_lie_as_their_tensors_do(launches: list[tuple[BuiltPlan, list[int]]]) -> None:
    qkv, operands = given()
    *grads, further = backward(qkv, operands, CALL)
    assert [grad.stride() for grad in grads] == [t.stride() for t in qkv]
    assert further == []
    assert launches[1][0].order == ("q", "k", "v", "out", "lse", "grad_out", "grad_q", "grad_k", "grad_v")


def test_what_is_added_up_in_place_begins_with_nothing(launches: list[tuple[BuiltPlan, list[int]]]) -> None:
    call = CudnnCall(scale=1.0, needs_grad=True, bias=True, bias_grad=True, sinks=True, sinks_grad=True)
    qkv, operands = given(call)
    *_, further = backward(qkv, operands, call)
    assert [(tuple(g.shape), g.dtype, g.abs().max().item()) for g in further] == [((1, 4, 16, 16), torch.bfloat16, 0.0)]


def test_a_row_without_keys_is_written_by_nobody_else(launches: list[tuple[BuiltPlan, list[int]]]) -> None:
    qkv, operands = given(CudnnCall(scale=1.0, needs_grad=True, lengths=True))
    for call in (CudnnCall(scale=1.0, needs_grad=True, lengths=True), CudnnCall(scale=1.0, lengths=True)):
        out, lse = launch.forward(*qkv, operands, call.to_text())
        assert out.abs().max() == 0
        # Without gradients nobody reads the lse.
        assert not call.needs_grad or lse.abs().max() == 0
    call = CudnnCall(scale=1.0, needs_grad=True, lengths=True)
    *grads, _ = launch.gradients(torch.randn_like(out), lse, *qkv, operands, out, lse, call.to_text())
    assert all(grad.abs().max() == 0 for grad in grads)


def test_equal_calls_look_their_plan_up_once(
    launches: list[tuple[BuiltPlan, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[Any] = []
    get = frontend.PLANS.get
    monkeypatch.setattr(frontend.PLANS, "get", lambda key: (keys.append(key), get(key))[1])
    for _ in range(3):
        qkv, operands = given()
        backward(qkv, operands, CALL)
    assert len(keys) == frontend.PLANS.counts.builds == 2
    (q, k, v), _ = given()
    launch.forward(q.contiguous(), k, v, [], CALL.to_text())
    assert frontend.PLANS.counts.forward == 2
    assert len({id(plan) for plan, _ in launches}) == 3


def test_operands_of_equal_strides_and_other_shapes_are_not_alike(launches: list[tuple[BuiltPlan, list[int]]]) -> None:
    """A bias for all batch rows, and one for each: their strides say nothing of that."""
    call = CudnnCall(scale=1.0, needs_grad=True, bias=True)
    qkv, _ = given()
    for batch in (1, 2):
        backward(qkv, [bf16(batch, 4, 16, 16)], call)
    shapes = [plan.graph.named(graphs.UIDS)["bias"].dim[0] for plan, _ in launches]
    assert shapes == [1, 1, 2, 2]


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tensor_that_begins_between_vectors_is_copied(launches: list[tuple[BuiltPlan, list[int]]], name: str) -> None:
    qkv, _ = given()
    at = "qkv".index(name)
    tensor = qkv[at]
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.transpose(1, 2).shape).transpose(1, 2)
    changed = [*qkv[:at], moved.copy_(tensor), *qkv[at + 1 :]]
    launch.forward(*changed, [], CALL.to_text())  # type: ignore[misc]
    assert all(address % 16 == 0 for address in launches[0][1])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strides_of_axes_of_one_element_mean_nothing(launches: list[tuple[BuiltPlan, list[int]]], axis: int) -> None:
    """A gradient that was cut out of a larger one has them: no copy changes them, since none is needed."""
    call = CudnnCall(scale=1.0, needs_grad=True)
    sizes = [2, 4, 16]
    sizes[axis] = 1
    batch, heads, seqlen = sizes
    qkv = (bshd(batch, heads, seqlen, 16), bshd(batch, heads, 16, 16), bshd(batch, heads, 16, 16))
    out, lse = launch.forward(*qkv, [], call.to_text())
    strides = list(out.stride())
    strides[axis] = 4096
    grad_out = torch.randn_like(out).as_strided(out.shape, strides)
    launch.gradients(grad_out, lse, *qkv, [], out, lse, call.to_text())
    plan, addresses = launches[-1]
    assert addresses[plan.order.index("grad_out")] == grad_out.data_ptr()


# ---- places in compiled code ------------------------------------------------------------------------------------------


def test_a_place_looks_at_its_tensors_once(
    launches: list[tuple[BuiltPlan, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward_ = launch.ForwardSite(), launch.BackwardSite()
    text = CALL.to_text()
    for step in range(3):
        (q, k, v), _ = given()
        out, lse = forward(q, k, v, [], text)
        assert lse is not None
        assert launches[-1][1] == [t.data_ptr() for t in (q, k, v, out, lse)]
        grad_out = torch.randn_like(out)
        grads = backward_(grad_out, lse, q, k, v, [], out, lse, text)[:3]
        assert launches[-1][1] == [t.data_ptr() for t in (q, k, v, out, lse, grad_out, *grads)]
        if step == 0:
            monkeypatch.setattr(leaf_calls, "call_cache", None)


def test_a_place_without_gradients_makes_no_statistics(launches: list[tuple[BuiltPlan, list[int]]]) -> None:
    place = launch.ForwardSite()
    call = CudnnCall(scale=1.0, lengths=True)
    qkv, operands = given(call)
    place(*qkv, operands, call.to_text())
    out, lse = place(*qkv, operands, call.to_text())
    assert lse is None
    assert out.abs().max() == 0
    assert launches[-1][0].order == ("q", "k", "v", "out", "lengths_q", "lengths")
    assert launches[-1][1][3:] == [t.data_ptr() for t in (out, *operands)]


def test_a_place_copies_what_begins_between_vectors(launches: list[tuple[BuiltPlan, list[int]]]) -> None:
    forward, backward_ = launch.ForwardSite(), launch.BackwardSite()
    (q, k, v), _ = given()
    moved = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.transpose(1, 2).shape).transpose(1, 2).copy_(k)
    for key in (k, moved, k):
        out, lse = forward(q, key, v, [], CALL.to_text())
        assert lse is not None
        backward_(torch.randn_like(out), lse, q, key, v, [], out, lse, CALL.to_text())
    assert all(address % 16 == 0 for _, addresses in launches for address in addresses)


# ---- what was planned while compiling is what is asked for ------------------------------------------------------------


def packed_mqa() -> Three:
    """q, k and v of one [S, B, Hq + 2 · Hkv, D] projection, 16 heads of queries and one of keys: the classic report
    (https://github.com/NVIDIA/TransformerEngine/issues/1195)."""
    x = bf16(2048, 1, 18, 64)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (x[:, :, :16], x[:, :, 16:17], x[:, :, 17:]))
    return q, k, v


def layouts() -> dict[str, tuple[Three, tuple[str, ...]]]:
    """Views that models make, by name: q, k and v, and those that have to be copied."""
    batch, heads, seqlen, head_dim = 2, 4, 32, 64
    plain = tuple(bshd(batch, heads, seqlen, head_dim) for _ in range(3))
    fused = bf16(batch, seqlen, 3, heads, head_dim)
    interleaved = bf16(batch, seqlen, heads, 3 * head_dim)
    cache = [bf16(batch, 48, heads, head_dim)[:, :seqlen].transpose(1, 2) for _ in range(2)]
    wide = [bf16(batch, seqlen, heads, 96)[..., :head_dim].transpose(1, 2) for _ in range(3)]
    one_head = [bf16(batch, 1, seqlen, head_dim).expand(batch, heads, seqlen, head_dim) for _ in range(2)]
    odd = bf16(batch, seqlen, heads, 68)[..., :head_dim].transpose(1, 2)
    across = bf16(batch, heads, head_dim, seqlen).transpose(2, 3)
    q, k, v = plain
    return {
        "bshd": ((q, k, v), ()),
        "bhsd": (tuple(t.contiguous() for t in plain), ()),  # type: ignore[dict-item]
        "sbhd": (tuple(bf16(seqlen, batch, heads, head_dim).permute(1, 2, 0, 3) for _ in range(3)), ()),  # type: ignore[dict-item]
        "bs3hd": (tuple(fused[:, :, i].transpose(1, 2) for i in range(3)), ()),  # type: ignore[dict-item]
        "bsh3d": (tuple(t.transpose(1, 2) for t in interleaved.chunk(3, -1)), ()),  # type: ignore[dict-item]
        "only q a view of bhsd": ((q.contiguous(), k, v), ()),
        "cache[:, :s]": ((q, cache[0], cache[1]), ()),
        "x[..., :64] of 96": ((wide[0], wide[1], wide[2]), ()),
        "q alone x[..., :64] of 96": ((wide[0], k, v), ()),
        "sb(h+2hg)d": (packed_mqa(), ()),
        "expanded heads": ((q, one_head[0], one_head[1]), ("k", "v")),
        "strides of 136 bytes": ((odd, k, v), ("q",)),
        "head dim not last": ((q, across, v), ("k",)),
    }


def spec_of(qkv: Three, call: CudnnCall) -> AttentionSpec:
    q, k, v = (TensorSpec(shape=tuple(t.shape), strides=t.stride(), dtype="bfloat16", requires_grad=True) for t in qkv)
    score = ScoreSpec(scale=call.scale)
    return AttentionSpec(
        q=q, k=k, v=v, mask=MaskSpec(), score=score, device="cuda", out_dtype="bfloat16", needs_grad=call.needs_grad
    )


@pytest.mark.parametrize("name", layouts())
def test_no_plan_is_built_late(launches: list[tuple[BuiltPlan, list[int]]], name: str) -> None:
    """The plans for the spec's strides, with the copies that the demand asks for and no others, serve the real tensors."""
    qkv, copied = layouts()[name]
    lowering, spec = CudnnAttention(), spec_of(qkv, CALL)
    demand = lowering.demand(spec)
    assert tuple(n for n in "qkv" if demand.broken_by(getattr(spec, n)) is not None) == copied
    assert plans.refusals(CALL, spec, demand, HERE) == []
    q, k, v = (t.contiguous() if n in copied else t for n, t in zip("qkv", qkv, strict=True))
    backward((q, k, v), [], CALL, grad_out=bf16(q.shape[0], q.shape[1], q.shape[2], v.shape[3]))
    counts = frontend.PLANS.counts
    assert (counts.forward, counts.backward, counts.late) == (1, 1, 0)


def test_one_hundred_steps_with_changing_data_build_no_further_plan(
    launches: list[tuple[BuiltPlan, list[int]]],
) -> None:
    for _ in range(100):
        qkv, operands = given()
        backward(qkv, operands, CALL)
    assert (frontend.PLANS.counts.builds, len(launches)) == (2, 200)
    changed = CudnnCall(scale=0.125, right=0, left=7, needs_grad=True)
    for _ in range(3):
        qkv, operands = given()
        backward(qkv, operands, changed)
    assert frontend.PLANS.counts.builds == 4
