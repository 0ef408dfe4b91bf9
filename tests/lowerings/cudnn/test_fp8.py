from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_compiler import CurrentScaling, DelayedScaling, Fp8Recipe, StaticScaling, index_expr as ix
from attn_compiler.index_expr import Const, Index, Load
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.base import Operands
from attn_compiler.lowerings.cudnn import fp8 as cudnn, graphs, plan
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.masks import Dense, KeyBound, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Sinks
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import inductor as torch_inductor
from tests.lowerings import call_math, poison
from tests.lowerings.cudnn.recording_frontend import Frontend, NotSupported
from tests.lowerings.cudnn.test_lowering import laid
from tests.lowerings.emitting import GraphEmitter
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, bias, make_spec, refusal, words
from tests.lowerings.test_what_families_take import window

TARGET = Target.fake(cudnn_frontend="1.22.1")
BACK = dataclasses.replace(CAUSAL, kinds=(*CAUSAL.kinds, *window(40).kinds), dense=window(40).dense)
RECIPE = Fp8Recipe(scaling=CurrentScaling(granularity="tensor"))


IN_FP8: dict[str, Any] = {"head_dim": 128, "recipe": dataclasses.replace(RECIPE, backward=True)}


def spec_of(recipe: Fp8Recipe | None = RECIPE, **changes: Any) -> AttentionSpec:
    return dataclasses.replace(laid(make_spec(**changes)), fp8=recipe)


def why_not(recipe: Fp8Recipe | None = RECIPE, target: Target = TARGET, **changes: Any) -> str:
    return words(by_name("cudnn_fp8").why_not(spec_of(recipe, **changes), target))


def padded(bound: Any = None, **changes: Any) -> dict[str, Any]:
    """A number of keys for each of two batch rows."""
    bound = Load("lengths", (Index("b"),), "int") if bound is None else bound
    kinds = (KeyBound(side="last", bound=ix.add(bound, Const(-1))),)
    return {"mask": MaskSpec(kinds=kinds, dense=Dense(shape=(2, 1, 1, 128), dtype="bool")), **changes}


# ---- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": CAUSAL},
        {"mask": CAUSAL, "needs_grad": False},
        {"mask": BACK},
        padded(),
        {"heads": 16, "heads_kv": 2},
        {"head_dim": 256},
        IN_FP8,
        {**IN_FP8, "needs_grad": False, "seqlen_q": 200, "heads_kv": 1},
        {**IN_FP8, "needs_grad": False, "head_dim": 64},
        {"head_dim": 192, "head_dim_v": 128},
        {"dtype": "float16"},
        {"recipe": Fp8Recipe(scaling=DelayedScaling())},
        {"recipe": Fp8Recipe(scaling=StaticScaling(q=4.0, k=4.0, v=4.0), smooth_k=True, hadamard=True)},
    ],
)
def test_sites_that_it_serves(changes: dict[str, Any]) -> None:
    assert why_not(**changes) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"recipe": None}, "no recipe for this site"),
        (
            {"recipe": Fp8Recipe()},
            "one scale for each tensor; observed per block; give CurrentScaling(granularity='tensor')",
        ),
        (
            {"recipe": Fp8Recipe(scaling=DelayedScaling(granularity="head"))},
            "observed per head; give DelayedScaling(granularity='tensor')",
        ),
        ({"recipe": dataclasses.replace(RECIPE, forward_format="e5m2")}, "the forward is in e4m3; observed e5m2"),
        ({"target": Target.fake(cudnn_frontend="1.22.1", sm=100)}, "sm90: it was tried on no other; observed sm100"),
        ({"target": Target.fake(device="cpu")}, "runs on an NVIDIA GPU; observed device cpu; call model.to('cuda')"),
        ({"target": Target.fake()}, "observed not installed"),
        ({**IN_FP8, "head_dim": 64}, "with a backward in FP8, head dims are 128; observed 64 and 64; give Fp8Recipe(b"),
        (
            {**IN_FP8, "recipe": dataclasses.replace(IN_FP8["recipe"], gradient_format="e4m3")},
            "gradients are in e5m2; observed e4m3",
        ),
        (
            {**IN_FP8, "heads_kv": 2, "seqlen_q": 16384, "seqlen_kv": 16384},
            "at most 32768 queries for each key, those of a group together; observed 16384 x 4",
        ),
        (
            {**IN_FP8, "seqlen_q": 200, "seqlen_kv": 256},
            "lengths are multiples of 16; observed 200 x 256; give Fp8Recipe(backward=False)",
        ),
        ({"dtype": "float32"}, "call model.bfloat16()"),
        ({"head_dim": 72}, "in FP8 head dims are multiples of 16"),
        ({"head_dim": 272}, "at most 256"),
        ({"changes": (bias(1, 8, 128, 128),)}, "observed a bias"),
        ({"changes": (Sinks(requires_grad=True),)}, "observed sinks"),
        ({"dropout_p": 0.125}, "observed dropout"),
        ({"mask": BOTTOM_RIGHT, "seqlen_kv": 256}, "observed a diagonal from the bottom right"),
        ({"mask": window(40, 7)}, "observed keys after the query's own position"),
        ({"mask": window(40)}, "observed a window that no diagonal bounds"),
        ({"seqlen_q": 16, "seqlen_kv": 128}, "more than 32 queries"),
        ({"seqlen_q": "s0", "seqlen_kv": "s0"}, "a plan serves one shape"),
    ],
)
def test_sites_that_it_refuses(changes: dict[str, Any], expected: str) -> None:
    assert expected in why_not(**changes)


def test_a_tile_without_a_valid_key_would_not_end() -> None:
    """A window may lie beyond a row's length (known_bad, "fp8_hang")."""
    given = padded()
    kinds = (*given["mask"].kinds, SlidingWindow(left=40, right=None))
    refused = why_not(mask=dataclasses.replace(given["mask"], kinds=kinds))
    assert "https://github.com/NVIDIA/cudnn-frontend/issues/1009" in refused
    assert "issues/1009" not in why_not(**given)


# ---- plans ------------------------------------------------------------------------------------------------------------


def refused(**changes: Any) -> str:
    return words(refusal(by_name("cudnn_fp8"), spec_of(RECIPE, **changes), TARGET))


def test_plans_are_of_the_forward_in_fp8_and_the_backward_in_the_model_s_dtype(frontend: Frontend) -> None:
    assert why_not(mask=CAUSAL) == ""
    assert frontend.graphs == []
    assert refused(mask=CAUSAL) == ""
    forward, backward = frontend.graphs
    assert "scale_o" in forward.told
    assert "dO" in backward.told
    assert (forward.machine["io_data_type"].name, backward.machine["io_data_type"].name) == ("FP8_E4M3", "BFLOAT16")


def test_plans_are_for_tensors_without_gaps(frontend: Frontend) -> None:
    spec = spec_of()
    spec = dataclasses.replace(spec, q=dataclasses.replace(spec.q, strides=(128 * 24 * 64, 64, 24 * 64, 1)))
    assert refusal(by_name("cudnn_fp8"), spec, TARGET) == []
    for graph in frontend.graphs:
        assert graph.named(graphs.UIDS)["q"].stride == [128 * 8 * 64, 64, 8 * 64, 1]


def test_cudnn_s_refusal_is_handed_on(frontend: Frontend) -> None:
    frontend.errors["check_support"] = NotSupported("no engine in FP8")
    assert "cuDNN builds a plan; observed no engine in FP8" in refused()


# ---- what is computed -------------------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, operands: list[Tensor], text: str) -> tuple[Tensor, Tensor]:
    """cuDNN's forward in FP8, in float32 but for what it rounds: the output."""
    call = CudnnCall.from_text(text)
    named = dict(zip(call.operands, operands, strict=True))
    if call.lengths:
        assert named["lengths"].min() > 0, "a row without keys: this would hang"
    wide = [x.float() * named[f"descale_{name}"] for name, x in (("q", q), ("k", k), ("v", v))]
    out, lse = ops.empty_outputs(q, v)
    exact = call_math.attention(*wide, named, call)
    group = q.shape[1] // k.shape[1]
    scores = wide[0] @ wide[1].repeat_interleave(group, 1).mT * call.scale
    allowed = call_math.allowed(call, named, q.shape[2], k.shape[2], q.device)
    lse.copy_(scores.masked_fill(~allowed, -torch.inf).logsumexp(-1))
    written = exact * named["scale_out"]
    assert written.abs().max() <= 448
    return out.copy_(written.to(q.dtype)), lse


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: list[Tensor],
    out: Tensor,
    lse: Tensor,
    text: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """cuDNN's backward, in float32, from the output and lse that it is given."""
    call = CudnnCall.from_text(text)
    named = dict(zip(call.operands, operands, strict=True))
    group = q.shape[1] // k.shape[1]
    wide_q, wide_k, wide_v, grad = (x.float() for x in (q, k, v, grad_out))
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (wide_k, wide_v))
    allowed = call_math.allowed(call, named, q.shape[2], k.shape[2], q.device)
    weights = torch.where(allowed, torch.exp(wide_q @ wide_k.mT * call.scale - lse[..., None]), 0.0)
    scores = weights * (grad @ wide_v.mT - (grad * out.float()).sum(-1, keepdim=True)) * call.scale
    grads = (scores @ wide_k, _summed(scores.mT @ wide_q, group), _summed(weights.mT @ grad, group))
    grad_q, grad_k, grad_v = (torch.empty_like(x).copy_(g) for x, g in zip((q, k, v), grads, strict=True))
    return grad_q, grad_k, grad_v, []


def _backward_in_fp8(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: list[Tensor],
    out: Tensor,
    lse: Tensor,
    text: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """cuDNN's backward in FP8, in float32 but for what it writes; scales have to be small enough for all of it."""
    call = CudnnCall.from_text(text)
    named = dict(zip(call.operands, operands, strict=True))
    tensors = {"q": q, "k": k, "v": v, "out": out, "grad_out": grad_out}
    assert {x.dtype for x in (q, k, v, out)} == {torch.float8_e4m3fn}
    assert grad_out.transpose(1, 2).is_contiguous()
    wide = {name: x.float() * named[f"descale_{name}"] for name, x in tensors.items()}
    lengths = [named[name] for name in ("lengths_q", "lengths") if name in named]
    plain = dataclasses.replace(call, fp8="")
    *grads, _ = _backward(
        wide["grad_out"], grad_lse, wide["q"], wide["k"], wide["v"], lengths, wide["out"], lse, plain.to_text()
    )
    written = [g * named[f"scale_grad_{name}"] for name, g in zip("qkv", grads, strict=True)]
    assert all(x.nan_to_num(posinf=0.0, neginf=0.0).abs().max() <= 57344 for x in written)
    torch.testing.assert_close(named["scale_ds"] * named["descale_ds"], torch.ones(1))
    pairs = zip((q, k, v), written, strict=True)
    grad_q, grad_k, grad_v = (torch.empty_like(x, dtype=torch.float8_e5m2).copy_(g) for x, g in pairs)
    return grad_q, grad_k, grad_v, []


def _summed(grad: Tensor, group: int) -> Tensor:
    return grad.unflatten(1, (-1, group)).sum(2)


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """The ops of cuDNN, spelled out for tensors of the CPU."""
    library = torch.library.Library("attn_compiler", "FRAGMENT")
    library.impl("cudnn_fp8", _forward, "CPU")
    library.impl("cudnn_backward", _backward, "CPU")
    library.impl("cudnn_fp8_backward", _backward_in_fp8, "CPU")
    yield
    library._destroy()


def emitted(spec: AttentionSpec, given: dict[str, Tensor], lengths: Tensor | None = None) -> tuple[fx.GraphModule, Any]:
    """The lowering's nodes as a function of the tensors, and the emitter."""
    graph, mode = fx.Graph(), FakeTensorMode()
    tensors = given | ({} if lengths is None else {"lengths": lengths})
    nodes = {name: graph.placeholder(name) for name in tensors}
    for name, node in nodes.items():
        node.meta["example_value"] = mode.from_tensor(tensors[name], static_shapes=True)
    loads = {} if lengths is None else {"lengths": nodes["lengths"]}
    emitter = GraphEmitter(graph, TARGET)
    with mode:
        operands = Operands(q=nodes["q"], k=nodes["k"], v=nodes["v"], loads=loads)
        graph.output(by_name("cudnn_fp8").emit(emitter, spec, operands))
    return fx.GraphModule(torch.nn.Module(), graph), emitter


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": CAUSAL},
    "window": {"mask": BACK},
    "gqa": {"mask": CAUSAL, "heads_kv": 2},
    "lengths": padded(),
    "smooth_k": {"mask": CAUSAL, "recipe": dataclasses.replace(RECIPE, smooth_k=True)},
    "hadamard": {"recipe": dataclasses.replace(RECIPE, hadamard=True)},
    "backward": {"mask": CAUSAL, "heads_kv": 2, **IN_FP8},
    "backward, lengths, smooth_k": {
        **padded(),
        "head_dim": 128,
        "recipe": dataclasses.replace(RECIPE, backward=True, smooth_k=True),
    },
    "static": {"recipe": Fp8Recipe(scaling=StaticScaling(q=5.0, k=5.0, v=5.0))},
}


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", CASES)
def test_out_and_gradients_are_near_those_that_are_not_rounded(name: str) -> None:
    torch.manual_seed(0)
    spec = spec_of(**{"heads": 4, "heads_kv": 4, **CASES[name]})
    shapes = {n: getattr(spec, n).shape for n in "qkv"}
    given = {n: torch.randn(s[0], s[2], s[1], s[3]).bfloat16().transpose(1, 2) for n, s in shapes.items()}
    if "smooth_k" in name:
        given["k"] = (given["k"].float() + 3).bfloat16()
    lengths = torch.tensor([100, 0]) if "lengths" in name else None
    module, emitter = emitted(spec, given, lengths)
    upstream = torch.randn(2, 4, 128, spec.v.shape[3]).bfloat16()

    def results(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given.values()]
        out = function(*leaves)
        return [out.detach().float(), *(x.float() for x in torch.autograd.grad(out, leaves, upstream.to(out.dtype)))]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        named = {} if lengths is None else {"lengths": lengths}
        band = plan.band_of(spec)
        call = CudnnCall(scale=0.125, left=band.left, right=band.right, lengths=lengths is not None)
        return call_math.attention(q, k, v, named, call)

    found = results(lambda *x: module(*x, *([] if lengths is None else [lengths])), torch.bfloat16)
    right = results(exact, torch.float32)
    allowed = 0.15 if "backward" in name else 0.08
    for mine, wanted in zip(found, right, strict=True):
        assert (mine - wanted).norm() / wanted.norm() < allowed
    if lengths is not None:
        assert all(x[1].abs().max() == 0 for x in found)
    assert any("nodes of the graph cast to bfloat16" in note for note in emitter.notes)


MEAN = "attn_compiler.mean_fp8.default"
#: what one scale for each tensor takes
ROUNDING = ("attn_compiler.largest_fp8.default", "attn_compiler.round_fp8.default")
#: by backward: scales of gradients
HELD = {"cudnn": (), "cudnn_fp8": ("attn_compiler.held_forward.default",)}


@pytest.mark.in_turns(2)
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("name", "backward"), [("lengths", "cudnn"), ("backward, lengths, smooth_k", "cudnn_fp8")])
def test_compiled_code_holds_no_copy_for_what_is_attached(
    name: str, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "BODIES", {})
    torch.manual_seed(0)
    spec = spec_of(**{"heads": 4, "heads_kv": 4, **CASES[name]})
    given = {n: torch.randn(getattr(spec, n).shape).bfloat16() for n in "qkv"}
    lengths = torch.tensor([100, 0])
    module, _ = emitted(spec, given, lengths)
    calls: list[str] = []

    def noted(graph: fx.Graph) -> None:
        ops.without_autograd(graph)
        calls.extend(str(node.target) for node in graph.nodes if "attn_compiler" in str(node.target))

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return torch_inductor.compile_with_inductor(gm, inputs, patches={}, cache_key=name, joint_pass=noted)

    upstream = torch.randn(spec.q.shape).bfloat16()
    found = []
    with torch._inductor.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        for function in (module, torch.compile(module, backend=backend)):
            leaves = [x.clone().requires_grad_() for x in given.values()]
            out = function(*leaves, lengths)
            found.append([out, *torch.autograd.grad(out, leaves, upstream)])
    # Sums in another order: now and then an element is rounded to the next number of the format.
    for compiled, eager in zip(found[1], found[0], strict=True):
        assert (compiled.float() - eager.float()).norm() <= 0.005 * eager.float().norm()
    rounding = [MEAN, *ROUNDING] if "smooth_k" in name else ROUNDING
    leaves_of = ("attn_compiler.cudnn_fp8.default", f"attn_compiler.{backward}_backward.default")
    assert calls == [*rounding, *leaves_of, *HELD[backward]]


@pytest.mark.usefixtures("on_the_cpu")
def test_without_gradients_nothing_is_attached() -> None:
    spec = spec_of(needs_grad=False)
    given = {n: torch.randn(getattr(spec, n).shape).bfloat16() for n in "qkv"}
    module, _ = emitted(spec, given)
    names = [str(node.target) for node in module.graph.nodes if "attn_compiler" in str(node.target)]
    assert names == [*ROUNDING, "attn_compiler.cudnn_fp8.default"]


def test_weights_are_rounded_as_large_as_the_format_allows_and_out_has_room() -> None:
    assert cudnn._WEIGHT_SCALE <= 448
    assert cudnn._OUT_MARGIN < 1


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", ["lengths", "backward, lengths, smooth_k"])
def test_what_lies_beyond_a_length_is_in_no_result(name: str) -> None:
    """Also in a batch row without keys, which cuDNN is given one of."""
    torch.manual_seed(0)
    spec = spec_of(**{"heads": 4, "heads_kv": 4, **CASES[name]})
    given = {n: torch.randn(getattr(spec, n).shape).bfloat16() for n in "qkv"}
    lengths = torch.tensor([100, 0])
    unseen = torch.arange(given["k"].shape[2]) >= lengths[:, None, None]
    upstream = torch.randn(spec.q.shape).bfloat16()
    found = []
    for values in ((0.0,), poison.NOT_FINITE):
        filled = {n: x if n == "q" else poison.filled(x, unseen, values) for n, x in given.items()}
        module, _ = emitted(spec, filled, lengths)
        leaves = [x.clone().requires_grad_() for x in filled.values()]
        out = module(*leaves, lengths)
        found.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for mine, right in zip(found[1], found[0], strict=True):
        assert torch.equal(mine, right)
    out, grad_q, *_ = found[1]
    assert not out[1].any()
    assert not grad_q[1].any()
