"""cuDNN's own graphs on a GPU: every feature against float32 math, forward and gradients; layouts, CUDA graphs, threads and streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.cudnn import frontend
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.lowerings.shared.limits import known_bad
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.cases import Case
from tests.lowerings import call_math
from tests.lowerings.call_math import Problem
from tests.lowerings.emitting import emit
from tests.lowerings.sdpa.test_lowering import contiguous, gpu_cases, run
from tests.lowerings.specs import refusal

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def usable() -> None:
    pytest.importorskip("cudnn", reason="needs the extra: pip install -e '.[cudnn]'")
    reasons = by_name("cudnn").unavailable(Target.current(DEVICE))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


def leaf(call: CudnnCall, q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Tensor]) -> Tensor:
    out: Tensor = torch.ops.attn_compiler.cudnn.default(q, k, v, [named[n] for n in call.operands], call.to_text())[0]
    return out


def in_memory(layout: str, batch: int, heads: int, seqlen: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    match layout:
        case "bhsd":
            return normal(batch, heads, seqlen, head_dim)
        case "bshd":
            return normal(batch, seqlen, heads, head_dim).transpose(1, 2)
        case "sbhd":
            return normal(seqlen, batch, heads, head_dim).permute(1, 2, 0, 3)
        case "bs3hd":
            return normal(batch, seqlen, 3, heads, head_dim)[:, :, 1].transpose(1, 2)
        case "bsh3d":
            return normal(batch, seqlen, heads, 3 * head_dim)[..., head_dim : 2 * head_dim].transpose(1, 2)
        case "cache":
            return normal(batch, seqlen + 64, heads, head_dim)[:, :seqlen].transpose(1, 2)
        case "wide":
            return normal(batch, seqlen, heads, head_dim + 64)[..., :head_dim].transpose(1, 2)
        case "odd start":
            flat = normal(batch * seqlen * heads * head_dim + 1)[1:]
            return flat.view(batch, seqlen, heads, head_dim).transpose(1, 2)
    raise ValueError(f"no layout {layout!r}")


def problem(
    *,
    batch: int = 2,
    heads: int = 4,
    heads_kv: int | None = None,
    seqlen_q: int = 256,
    seqlen_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = BF16,
    layouts: tuple[str, str, str] = ("bshd", "bshd", "bshd"),
    bias: tuple[int, ...] | None = None,
    lengths: list[int] | None = None,
    needs_grad: bool = True,
    **told: Any,
) -> Problem:
    torch.manual_seed(0)
    heads_kv, seqlen_kv, head_dim_v = heads_kv or heads, seqlen_kv or seqlen_q, head_dim_v or head_dim
    call = CudnnCall(
        scale=head_dim**-0.5, bias=bias is not None, lengths=lengths is not None, needs_grad=needs_grad, **told
    )
    sizes = ((heads, seqlen_q, head_dim), (heads_kv, seqlen_kv, head_dim), (heads_kv, seqlen_kv, head_dim_v))
    q, k, v = (in_memory(layout, batch, *size, dtype) for layout, size in zip(layouts, sizes, strict=True))
    named = call_math.operands(
        call, batch=batch, heads=heads, seqlen_q=seqlen_q, bias=bias, lengths=lengths, dtype=dtype, device=DEVICE
    )
    return Problem(call=call, q=q, k=k, v=v, named=named)


def check(given: Problem) -> None:
    call_math.assert_within_rule(given, lambda q, k, v, named: leaf(given.call, q, k, v, named))


SINKS: dict[str, Any] = {"sinks": True, "sinks_grad": True}
GQA: dict[str, Any] = {"heads": 8, "heads_kv": 2}
CROSS: dict[str, Any] = {"seqlen_q": 128, "seqlen_kv": 256}

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "float16": {"dtype": torch.float16, "right": 0},
    "causal": {"right": 0},
    "odd length": {"right": 0, "seqlen_q": 201},
    "top left, more keys": {"right": 0, **CROSS},
    "top left, more queries": {"right": 0, "seqlen_q": 256, "seqlen_kv": 128},
    "bottom right": {"right": 0, "from_end": True, **CROSS},
    "bottom right, odd lengths": {"right": 0, "from_end": True, "seqlen_q": 75, "seqlen_kv": 201},
    "window": {"right": 0, "left": 31},
    "window of one key": {"right": 0, "left": 0},
    "window of two keys": {"right": 0, "left": 1},
    "window back": {"left": 31},
    "window both ways": {"left": 31, "right": 17},
    "window from the end": {"right": 0, "left": 40, "from_end": True, **CROSS},
    "long window": {"right": 0, "left": 1023, "seqlen_q": 2048, "batch": 1, "head_dim": 128},
    "gqa": {"right": 0, **GQA},
    "mqa": {"right": 0, "heads": 8, "heads_kv": 1},
    "lengths": {"lengths": [256, 100]},
    "lengths, causal": {"lengths": [200, 1], "right": 0},
    "lengths, gqa": {"lengths": [256, 77], **GQA},
    "a row without keys": {"lengths": [0, 100]},
    "a row without keys, causal": {"lengths": [0, 100], "right": 0},
    "a row without keys, sinks": {**SINKS, "lengths": [0, 100]},
    "window beyond the length": {"lengths": [256, 50], "right": 0, "left": 31},
    "bias of all": {"bias": (2, 4, 256, 256)},
    "bias of heads, causal": {"bias": (1, 4, 256, 256), "right": 0},
    "learned bias of all": {"bias": (2, 4, 256, 256), "bias_grad": True},
    "learned bias of heads": {"bias": (1, 4, 256, 256), "bias_grad": True},
    "learned bias of batches": {"bias": (2, 1, 256, 256), "bias_grad": True},
    "learned bias of neither": {"bias": (1, 1, 256, 256), "bias_grad": True},
    "sinks": SINKS,
    "sinks, window": {**SINKS, "right": 0, "left": 31},
    "sinks, gqa": {**SINKS, **GQA, "right": 0},
    "frozen sinks": {"sinks": True, "right": 0},
    "sinks, lengths": {**SINKS, "lengths": [256, 100]},
    "deterministic": {"right": 0, "deterministic": True},
    "deterministic, gqa": {"deterministic": True, **GQA},
    "one query": {"seqlen_q": 1, "seqlen_kv": 256, "needs_grad": False},
    "one query, lengths": {"seqlen_q": 1, "seqlen_kv": 256, "needs_grad": False, "lengths": [256, 9]},
    **{f"head dim {d}": {"head_dim": d, "right": 0} for d in (40, 80, 96, 128, 192, 256)},
    **{
        f"head dims {d} and {v}": {"head_dim": d, "head_dim_v": v, "right": 0}
        for d, v in ((192, 128), (128, 64), (64, 128), (96, 64))
    },
}


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_is_within_the_numeric_rule(name: str) -> None:
    check(problem(**FEATURES[name]))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "bs3hd", "bsh3d", "cache", "wide", "odd start"])
def test_each_layout_is_within_the_numeric_rule(layout: str) -> None:
    check(problem(layouts=(layout, layout, layout), right=0))


@pytest.mark.parametrize("layouts", [("bshd", "cache", "bhsd"), ("wide", "bshd", "bshd"), ("bhsd", "bshd", "bshd")])
def test_mixed_layouts_are_within_the_numeric_rule(layouts: tuple[str, str, str]) -> None:
    check(problem(layouts=layouts))


def test_the_classic_packing_of_one_projection() -> None:
    """sb(h+2hg)d, error 6.195 where strides were guessed (https://github.com/NVIDIA/TransformerEngine/issues/1195)."""
    joined = torch.randn(2048, 1, 18, 64, device=DEVICE).to(BF16)
    q, k, v = (part.permute(1, 2, 0, 3) for part in joined.split([16, 1, 1], dim=2))
    check(Problem(call=CudnnCall(scale=0.125, right=0, needs_grad=True), q=q, k=k, v=v))


@pytest.mark.parametrize("case", gpu_cases(), ids=lambda case: case.name)
def test_every_case_that_is_not_refused(case: Case) -> None:
    inputs = cases.build(case, device=DEVICE)
    lowering = by_name("cudnn")
    reasons = refusal(lowering, inputs.spec, Target.current(DEVICE))
    if reasons or case.dropout_p:
        pytest.skip("; ".join(map(str, reasons)) or "dropout is random")
    if case.layout in ("last_stride", "expanded_heads", "expanded_batch"):
        inputs = contiguous(inputs)
    numerics.assert_within_rule(numerics.with_gradients(run(emit(lowering, inputs)), inputs), inputs)


@pytest.mark.parametrize(
    ("call", "is_nan"),
    [
        ({}, True),
        ({"bias": True}, True),
        ({"dropout_p": 0.125}, True),
        ({"lengths": True, "counted": True}, False),
        ({"lengths": True, "counted": True, "bias": True}, False),
        ({"right": 0}, False),
        ({"right": 0, "left": 40}, False),
        ({"right": 30, "left": 40}, False),
    ],
)
def test_nan_in_dq_and_the_way_around_it(call: dict[str, Any], is_nan: bool) -> None:
    """Scores far below 0, and 192 keys, which is 64 modulo 128 (known_bad, "nan_dq")."""
    told = CudnnCall(scale=1.0, needs_grad=True, **call)
    shape = (1, 4, 192, 64)
    q = torch.full(shape, 6.0, device=DEVICE, dtype=BF16, requires_grad=True)
    k = (0.1 * torch.randn(shape, device=DEVICE) - 6).to(BF16).requires_grad_()
    v = torch.randn(shape, device=DEVICE).to(BF16).requires_grad_()
    lengths = torch.full((1,), 192, dtype=torch.int32, device=DEVICE)
    seed = torch.ones(1, dtype=torch.int64, device=DEVICE)
    added = torch.zeros(1, 4, 192, 192, dtype=BF16, device=DEVICE)
    out = leaf(told, q, k, v, {"lengths": lengths, "lengths_q": lengths, "bias": added, "seed": seed, "offset": seed})
    (grad_q,) = torch.autograd.grad(out, q, torch.randn_like(out))
    is_known = known_bad.CUDNN["nan_dq"].meets(Target.current(DEVICE))
    assert bool(grad_q.isnan().any()) == (is_nan and is_known)


# ---- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [None, 0])
def test_dropout_drops_its_share_and_the_backward_draws_the_same(right: int | None) -> None:
    """With equal scores and v the identity, the output is the weights themselves."""
    seqlen, p = 128, 0.125
    call = CudnnCall(scale=1.0, right=right, dropout_p=p, needs_grad=True)
    q, k = (torch.zeros(2, 4, seqlen, seqlen, dtype=BF16, device=DEVICE, requires_grad=True) for _ in range(2))
    v = torch.eye(seqlen, dtype=BF16, device=DEVICE).expand(2, 4, -1, -1).contiguous().requires_grad_()

    def weights(seed: int) -> Tensor:
        named = {
            "seed": torch.tensor([seed], device=DEVICE),
            "offset": torch.zeros(1, dtype=torch.int64, device=DEVICE),
        }
        return leaf(call, q, k, v, named)

    first = weights(5)
    assert torch.equal(first, weights(5))
    assert not torch.equal(first, weights(6))
    assert not torch.equal(first[0, 0], first[0, 1])
    assert not torch.equal(first[0], first[1])
    usable = call_math.allowed(call, {}, seqlen, seqlen, q.device).expand_as(first)
    kept = (first > 0)[usable].float().mean().item()
    assert abs(kept - (1 - p)) < 0.01
    scaled = (first.float() * usable.sum(-1, keepdim=True))[first > 0].mean().item()
    assert abs(scaled - 1 / (1 - p)) < 0.01
    upstream = torch.randn_like(first)
    (grad_v,) = torch.autograd.grad(first, v, upstream)
    expected = first.detach().float().transpose(-1, -2) @ upstream.float()
    assert (grad_v.float() - expected).abs().max() < 0.05


# ---- running ----------------------------------------------------------------------------------------------------------


def test_a_deterministic_backward_gives_the_same_bits() -> None:
    given = problem(right=0, deterministic=True, seqlen_q=2048, head_dim=128)
    upstream = torch.randn(*given.q.shape, device=DEVICE).to(BF16)

    def gradients() -> list[Tensor]:
        return call_math.results(given, lambda q, k, v, named: leaf(given.call, q, k, v, named), None, upstream)

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


def test_forward_and_backward_can_be_captured() -> None:
    given = problem(right=0, left=100)
    q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
    upstream = torch.randn(*q.shape, device=DEVICE).to(BF16)

    def step() -> tuple[Tensor, ...]:
        out = leaf(given.call, q, k, v, {})
        return out, *torch.autograd.grad(out, (q, k, v), upstream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for tensor in (q, k, v):
                tensor.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}])
def test_compiled_code_calls_what_eager_code_calls(options: dict[str, Any]) -> None:
    """Inductor's code calls the bodies by themselves; forward and gradients are the op's, and no plan is built for them."""
    given = problem(right=0, heads=8, heads_kv=2)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    compiled = torch.compile(attention, backend="attn_compiler", options={"lowering": "cudnn", **options})
    upstream = torch.randn(given.q.shape, device=DEVICE).to(BF16)

    def results(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
        out = function(*leaves)
        return [x.detach().clone() for x in (out, *torch.autograd.grad(out, leaves, upstream))]

    expected = results(lambda q, k, v: leaf(given.call, q, k, v, {}))
    for _ in range(3):
        found = results(compiled)
    late = frontend.PLANS.counts.late
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    results(compiled)
    assert frontend.PLANS.counts.late == late


def test_threads_on_streams_of_their_own() -> None:
    failures: list[Any] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for round_ in range(40):
                    given = problem(right=0, batch=1, seqlen_q=128 + 64 * ((number + round_) % 3), needs_grad=False)
                    got = leaf(given.call, given.q, given.k, given.v, {})
                    q, k, v = (x.float() for x in (given.q, given.k, given.v))
                    expected = call_math.attention(q, k, v, {}, given.call)
                    torch.testing.assert_close(got.float(), expected, rtol=0.03, atol=0.03)
        except Exception as error:  # noqa: BLE001 - a thread's failure is the test's
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_equal_calls_share_their_plans() -> None:
    given = problem(right=0, seqlen_q=320)
    check(given)
    before = frontend.PLANS.counts.builds
    check(problem(right=0, seqlen_q=320))
    assert frontend.PLANS.counts.builds == before
