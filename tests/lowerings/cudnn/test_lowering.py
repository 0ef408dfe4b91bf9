"""What the lowering refuses and puts into a graph, and its ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.cudnn import frontend as cudnn_frontend, graphs, limits, ops, plan
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.target import Target
from tests.lowerings import call_math
from tests.lowerings.cudnn.recording_frontend import Frontend, NotSupported
from tests.lowerings.specs import CAUSAL, bias, make_spec, refusal, words

TARGET = Target.fake(cudnn_frontend="1.22.1")


def laid(spec: AttentionSpec) -> AttentionSpec:
    """The spec with q, k and v as views of contiguous BSHD memory, where their sizes are known."""

    def strides(tensor: TensorSpec) -> TensorSpec:
        _, heads, seqlen, head_dim = tensor.shape
        if not (isinstance(heads, int) and isinstance(seqlen, int) and isinstance(head_dim, int)):
            return tensor
        return dataclasses.replace(tensor, strides=(seqlen * heads * head_dim, head_dim, heads * head_dim, 1))

    return dataclasses.replace(spec, q=strides(spec.q), k=strides(spec.k), v=strides(spec.v))


def why_not(target: Target = TARGET, **changes: Any) -> str:
    return words(by_name("cudnn").why_not(laid(make_spec(**changes)), target))


# ---- machines ---------------------------------------------------------------------------------------------------------


# ---- sites ------------------------------------------------------------------------------------------------------------


def test_the_demand_is_what_cudnn_can_not_read() -> None:
    spec = laid(make_spec())
    demand = by_name("cudnn").demand(spec)
    assert demand.broken_by(spec.q) is None
    assert demand.broken_by(dataclasses.replace(spec.k, strides=(64, 0, 64, 1))) is not None
    assert demand.broken_by(dataclasses.replace(spec.k, strides=(8192, 64, 1, 128))) is not None
    assert demand.broken_by(dataclasses.replace(spec.k, strides=(65 * 1028, 65, 65 * 8, 1))) is not None


# ---- plans while compiling --------------------------------------------------------------------------------------------


def refused(target: Target = TARGET, **changes: Any) -> str:
    return words(refusal(by_name("cudnn"), laid(make_spec(**changes)), target))


def test_the_rules_build_nothing(frontend: Frontend) -> None:
    assert why_not(mask=CAUSAL) == ""
    assert frontend.graphs == []


def test_what_would_be_chosen_has_its_plans_built(frontend: Frontend) -> None:
    assert refused(mask=CAUSAL) == ""
    assert ["dO" in graph.told for graph in frontend.graphs] == [False, True]
    assert refused(mask=CAUSAL, needs_grad=False) == ""
    assert len(frontend.graphs) == 3
    assert cudnn_frontend.PLANS.counts.late == 0


def test_a_made_up_machine_builds_nothing(frontend: Frontend) -> None:
    assert refused(dataclasses.replace(TARGET, torch="2.14.0"), mask=CAUSAL) == ""
    assert frontend.graphs == []


def test_cudnns_refusal_sends_the_site_on_with_its_message(frontend: Frontend) -> None:
    frontend.errors["check_support"] = NotSupported("no engine for this head dim")
    spec = laid(make_spec(mask=CAUSAL))
    decision = select.decide(spec, TARGET, Options(lowerings=("cudnn", "triton")))
    assert decision.lowering == "triton"
    (refusal,) = decision.refusals
    assert refusal.lowering == "cudnn"
    assert refusal.reasons == (
        Reason(code=Code.NO_PLAN, rule="cuDNN builds a plan", observed="no engine for this head dim"),
    )


def test_a_shape_that_fails_only_in_the_backward_is_caught(frontend: Frontend) -> None:
    frontend.errors["build_plans"] = RuntimeError("no backward here")
    frontend.only_backward = True
    assert "observed no backward here" in refused(mask=CAUSAL)
    assert refused(mask=CAUSAL, needs_grad=False) == ""


def test_copies_that_layout_will_make_are_planned_for(frontend: Frontend) -> None:
    spec = laid(make_spec())
    spec = dataclasses.replace(spec, k=dataclasses.replace(spec.k, strides=(64, 0, 64, 1)))
    assert refusal(by_name("cudnn"), spec, TARGET) == []
    k = frontend.graphs[0].named(graphs.UIDS)["k"]
    assert k.stride == [8 * 128 * 64, 128 * 64, 64, 1]


@pytest.mark.parametrize(
    ("changes", "target", "counted"),
    [
        ({"seqlen_q": 192, "seqlen_kv": 192}, TARGET, True),
        ({"seqlen_q": 192, "seqlen_kv": 192, "dropout_p": 0.125}, TARGET, True),
        ({"seqlen_q": 192, "seqlen_kv": 256, "changes": (bias(1, 8, 192, 256),)}, TARGET, True),
        ({"seqlen_q": 192, "seqlen_kv": 192, "needs_grad": False}, TARGET, False),
        ({"seqlen_q": 192, "seqlen_kv": 192, "mask": CAUSAL}, TARGET, False),
        ({"seqlen_q": 192, "seqlen_kv": 256}, TARGET, False),
        ({"seqlen_q": 192, "seqlen_kv": 192}, dataclasses.replace(TARGET, cudnn=92_600), False),
    ],
)
def test_keys_are_counted_where_cudnn_would_go_beyond_them(
    changes: dict[str, Any], target: Target, counted: bool
) -> None:
    spec = laid(make_spec(**changes))
    call = limits.counted(plan.call_of(spec, deterministic=False), spec, target)
    assert (call.lengths, call.counted, call.may_be_empty) == (counted, counted, False)
    assert by_name("cudnn").why_not(spec, target) == []


def test_the_call_of_a_site_is_what_its_text_says() -> None:
    spec = laid(make_spec(mask=CAUSAL))
    assert CudnnCall.from_text(plan.call_of(spec, deterministic=False).to_text()).right == 0


# What cuDNN's own graphs refuse by what they are told, and when keys are counted for them.
TRAINING = CudnnCall(scale=0.125, needs_grad=True)
OF_64: dict[str, Any] = {"seqlen_q": 192, "seqlen_kv": 192}


def said(call: CudnnCall, target: Target, **spec: Any) -> str:
    return words(limits.check_graph(call, make_spec(**spec), target))


@pytest.mark.parametrize("call", [TRAINING, CudnnCall(scale=1.0, left=31, right=0), CudnnCall(scale=1.0, lengths=True)])
def test_plain_lengths_are_served(call: CudnnCall) -> None:
    assert said(call, Target.fake()) == ""


@pytest.mark.parametrize("keys", [100, "s0"])
@pytest.mark.parametrize(("cudnn", "refused"), [(91_500, True), (91_501, False)])
def test_keys_off_128_want_a_cudnn_without_the_bug(keys: int | str, cudnn: int, refused: bool) -> None:
    found = said(TRAINING, Target.fake(cudnn=cudnn), seqlen_q=128, seqlen_kv=keys)
    assert ("issues/169849" in found) is refused


@pytest.mark.parametrize(
    ("sides", "refused"),
    [({"left": 31}, True), ({"left": 31, "right": 4}, True), ({"left": 31, "right": 0}, False), ({"right": 4}, False)],
)
def test_only_a_window_without_a_diagonal_meets_the_bug_of_windows(sides: dict[str, int], refused: bool) -> None:
    call = CudnnCall(scale=1.0, **sides)
    assert ("for a window that is not causal" in said(call, Target.fake(cudnn=91_400))) is refused
    assert "window" not in said(call, Target.fake(cudnn=91_500))


@pytest.mark.parametrize("call", [TRAINING, CudnnCall(scale=1.0, needs_grad=True, bias=True, right=0)])
def test_where_nothing_bounds_the_keys_a_gradient_may_be_nan(call: CudnnCall) -> None:
    assert "dQ can be NaN" in said(call, Target.fake(), **OF_64)
    assert said(call, Target.fake(), needs_grad=False, **OF_64) == ""
    assert said(call, Target.fake(cudnn=92_600), **OF_64) == ""


@pytest.mark.parametrize(
    "bounded",
    [
        CudnnCall(scale=1.0, needs_grad=True, right=0),
        CudnnCall(scale=1.0, needs_grad=True, left=9),
        CudnnCall(scale=1.0, needs_grad=True, lengths=True),
        CudnnCall(scale=1.0, needs_grad=True, lengths=True, bias=True),
    ],
)
def test_a_band_or_lengths_make_cudnn_look_at_the_last_key(bounded: CudnnCall) -> None:
    assert said(bounded, Target.fake(), **OF_64) == ""


def test_with_a_bias_the_queries_are_watched_too() -> None:
    sizes: dict[str, Any] = {"seqlen_q": 192, "seqlen_kv": 256}
    assert said(TRAINING, Target.fake(), **sizes) == ""
    assert "dQ can be NaN" in said(CudnnCall(scale=1.0, needs_grad=True, bias=True), Target.fake(), **sizes)


def test_keys_are_counted_only_where_nothing_else_bounds_them() -> None:
    spec = make_spec(**OF_64)
    counted = limits.counted(TRAINING, spec, Target.fake())
    assert (counted.lengths, counted.counted, counted.may_be_empty) == (True, True, False)
    assert said(counted, Target.fake(), **OF_64) == ""
    for call in (CudnnCall(scale=1.0, needs_grad=True, right=0), CudnnCall(scale=1.0, needs_grad=True, lengths=True)):
        assert limits.counted(call, spec, Target.fake()) is call
    assert limits.counted(TRAINING, make_spec(), Target.fake()) is TRAINING
    assert limits.counted(TRAINING, spec, Target.fake(cudnn=92_600)) is TRAINING


@pytest.mark.parametrize(("cudnn", "refused"), [(0, False), (90_000, True), (91_299, True), (91_300, False)])
def test_the_first_cudnn_with_graphs(cudnn: int, refused: bool) -> None:
    """None at all, or one before 9.0, is another refusal's."""
    found = words(limits.check_graph_version(Target.fake(cudnn=cudnn)))
    assert ("cuDNN 9.13.0 or newer for graphs of our own" in found) is refused
    assert bool(found) is refused


TEXT = CudnnCall(scale=0.125, right=0, needs_grad=True).to_text()


def bshd(*shape: int) -> torch.Tensor:
    batch, heads, seqlen, head_dim = shape
    return torch.empty(batch, seqlen, heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)


def test_the_op_can_be_traced_where_there_is_neither_gpu_nor_frontend() -> None:
    with FakeTensorMode():
        q, k, v = bshd(2, 4, 16, 32), bshd(2, 2, 24, 32), bshd(2, 2, 24, 8).contiguous()
        out, lse = torch.ops.attn_compiler.cudnn.default(q, k, v, [], TEXT)
        assert (tuple(out.shape), out.transpose(1, 2).is_contiguous(), out.dtype) == (
            (2, 4, 16, 8),
            True,
            torch.bfloat16,
        )
        assert (tuple(lse.shape), lse.dtype) == ((2, 4, 16), torch.float32)
        leaf = torch.ops.attn_compiler.cudnn_backward.default
        *grads, further = leaf(out, lse, q, k, v, [], out, lse, TEXT)
        assert [grad.stride() for grad in grads] == [t.stride() for t in (q, k, v)]
        assert further == []


def test_gradients_of_operands_follow_the_call() -> None:
    call = CudnnCall(scale=1.0, needs_grad=True, bias=True, sinks=True, sinks_grad=True, lengths=True)
    operands = [torch.empty(1)] * 4
    assert ops.differentiable(operands, call.to_text()) == [False, False, False, False]
    learned = dataclasses.replace(call, bias_grad=True)
    assert ops.differentiable(operands, learned.to_text()) == [True, False, False, False]
    with pytest.raises(ValueError, match="the call has the operands bias, sinks, lengths_q, lengths; got 1"):
        ops.differentiable(operands[:1], call.to_text())


def test_the_gradient_of_sinks_is_what_autograd_gives() -> None:
    batch, heads, seqlen, head_dim = 2, 3, 5, 8
    q, k, v = (torch.randn(batch, heads, seqlen, head_dim, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    call = CudnnCall(scale=0.3, right=0, sinks=True, sinks_grad=True, needs_grad=True)
    out = call_math.attention(q, k, v, {"sinks": sinks}, call)
    grad_out = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, sinks, grad_out)
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(torch.ones(seqlen, seqlen).triu(1).bool(), -torch.inf)
    joined = torch.cat([scores, sinks[None, :, None, None].expand(batch, -1, seqlen, 1)], -1)
    lse = torch.logsumexp(joined, -1)
    (found,) = ops.in_graph(grad_out, out, lse, [sinks], call.to_text())
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    frozen = CudnnCall(scale=0.3, sinks=True)
    assert ops.in_graph(grad_out, out, lse, [sinks], frozen.to_text()) == [None]


@pytest.mark.parametrize(("contiguous", "copies"), [(False, 0), (True, 1)])
def test_the_outputs_gradient_is_brought_into_place_by_a_node(contiguous: bool, copies: int) -> None:
    """In the traced backward, where the compiler can fuse it; and not at all where it lies so already."""

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, _ = torch.ops.attn_compiler.cudnn.default(q, k, v, [], TEXT)
        return torch.autograd.grad(out, (q, k, v), up)

    with FakeTensorMode():
        q, k, v = (bshd(2, 4, 16, 32).requires_grad_() for _ in range(3))
        up = bshd(2, 4, 16, 32)
        traced = make_fx(step, tracing_mode="fake")(q, k, v, up.contiguous() if contiguous else up)
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert names.count("aten.clone.default") == copies
    (leaf,) = (node for node in traced.graph.nodes if "cudnn_backward" in str(node.target))
    grad_out = leaf.args[0].meta["val"]
    assert grad_out.transpose(1, 2).is_contiguous()


# ---- the op in compiled code, its device side stood in for by its definition ------------------------------------------


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The op and its backward run on the CPU, as call_math says."""
    library: Any = torch.library.Library("attn_compiler", "IMPL")  # type: ignore[no-untyped-call]

    def math(q: Tensor, k: Tensor, v: Tensor, operands: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor]:
        call = CudnnCall.from_text(text)
        named = dict(zip(call.operands, operands, strict=True))
        group = q.shape[1] // k.shape[1]
        usable = call_math.allowed(call, named, q.shape[2], k.shape[2], q.device)
        scores = (q @ k.repeat_interleave(group, 1).transpose(-1, -2) * call.scale).masked_fill(~usable, -torch.inf)
        column = named["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        out = call_math.attention(q, k, v, named, call).transpose(1, 2).contiguous().transpose(1, 2)
        return out, torch.logsumexp(torch.cat([scores, column], -1), -1)

    def gradients(grad_out: Tensor, _: Tensor, q: Tensor, k: Tensor, v: Tensor, operands: Any, *rest: Any) -> Any:
        assert grad_out.transpose(1, 2).is_contiguous()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, _lse = math(*leaves, operands, rest[-1])
        found = torch.autograd.grad(out, leaves, grad_out)
        return (*(torch.empty_like(x).copy_(grad) for x, grad in zip((q, k, v), found, strict=True)), [])

    for name, function in (("cudnn", math), ("cudnn_forward", math), ("cudnn_backward", gradients)):
        library.impl(name, function, "CPU")
    yield
    library._destroy()


@pytest.mark.in_turns
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("bshd_upstream", [True, False])
@pytest.mark.usefixtures("on_cpu")
def test_compiled_gradients_are_those_of_the_definition(backend: str, bshd_upstream: bool) -> None:
    call = CudnnCall(scale=0.25, right=0, sinks=True, sinks_grad=True, needs_grad=True)
    q = torch.randn(2, 8, 4, 16).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, 8, 2, 16).transpose(1, 2).requires_grad_() for _ in range(2))
    sinks = torch.randn(4, requires_grad=True)
    upstream = torch.randn(2, 8, 4, 16).transpose(1, 2) if bshd_upstream else torch.randn(2, 4, 8, 16)

    def fused(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out: Tensor = torch.ops.attn_compiler.cudnn.default(q, k, v, [sinks], call.to_text())[0]
        return out * 2

    leaves = (q, k, v, sinks)
    found = torch.autograd.grad(torch.compile(fused, backend=backend)(*leaves), leaves, upstream)
    expected = torch.autograd.grad(call_math.attention(q, k, v, {"sinks": sinks}, call) * 2, leaves, upstream)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    assert [grad.stride() for grad in found[:3]] == [x.stride() for x in (q, k, v)]
