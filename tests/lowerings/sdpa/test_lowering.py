from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_compiler.lowerings import by_name
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.cases import BY_NAME, CASES, Case, Inputs
from tests.lowerings.emitting import arguments, calls, emit, output_value
from tests.passes.compiling import compiled

aten = torch.ops.aten
CPU = Target.current("cpu")
CPU_FLASH = by_name("sdpa_cpu_flash")
CUDA = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")

SERVED_ON_CPU = [case for case in CASES if not CPU_FLASH.why_not(cases.build(case).spec, CPU)]


def run(module: torch.nn.Module) -> numerics.Attention:
    return lambda inputs: module(*arguments(inputs))


def test_cpu_flash_serves_what_it_should() -> None:
    refused = {case.name for case in CASES} - {case.name for case in SERVED_ON_CPU}
    assert {name.removesuffix("_float16").removesuffix("_bfloat16") for name in refused} == {
        "causal_bottom_right",
        "causal_bottom_right_empty_rows",
        "head_dims_differ",
        "head_dims_differ_gqa",
        "softcap",
        "softcap_mask_gqa",
        "sinks",
        "sinks_empty_rows",
        "bias_heads",
        "bias_batch_causal",
        "bias_mask",
        "everything",
        "dropout",
    }


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", SERVED_ON_CPU, ids=lambda case: case.name)
def test_cpu_flash_is_within_the_numeric_rule(case: Case) -> None:
    inputs = cases.build(case)
    if case.layout == "last_stride":
        # The layout pass makes what the lowering demands; the kernel reads wrong elements otherwise.
        assert CPU_FLASH.demand(inputs.spec).last_stride_one
        inputs = contiguous(inputs)
    got = numerics.with_gradients(run(emit(CPU_FLASH, inputs)), inputs)
    numerics.assert_within_rule(got, inputs)


@pytest.mark.parametrize("case", SERVED_ON_CPU, ids=lambda case: case.name)
def test_cpu_flash_output_has_the_strides_that_its_fake_has(case: Case) -> None:
    inputs = cases.build(case, needs_grad=False)
    module = emit(CPU_FLASH, inputs)
    real, fake = module(*arguments(inputs)), output_value(module)
    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.in_turns
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "name", ["causal", "gqa_bfloat16", "mask_empty_rows", "additive_float32_bfloat16", "layout_bshd_gqa"]
)
def test_cpu_flash_is_differentiated_by_aot_autograd(name: str, backend: str) -> None:
    inputs = cases.build(BY_NAME[name])
    seen: list[Any] = []
    compiled = torch.compile(emit(CPU_FLASH, inputs), backend=watching(backend, seen), fullgraph=True)
    got = numerics.with_gradients(run(compiled), inputs)
    numerics.assert_within_rule(got, inputs)
    assert aten._scaled_dot_product_flash_attention_for_cpu.default in seen


def watching(backend: str, seen: list[Any]) -> Any:
    """The backend, after noting the targets of the Dynamo graph that it gets."""
    inner = torch._dynamo.lookup_backend(backend)

    def compile_fn(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.extend(calls(gm))
        return inner(gm, example_inputs)

    return compile_fn


def contiguous(inputs: Inputs) -> Inputs:
    tensors = {name: getattr(inputs, name).detach().contiguous().requires_grad_() for name in "qkv"}
    return dataclasses.replace(inputs, **tensors)


# ---- arguments ------------------------------------------------------------------------------------------------------


def moved(inputs: Inputs, device: str) -> Inputs:
    """The inputs' sizes, strides and dtypes on another device, with no numbers."""
    tensors = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        for name in ("q", "k", "v", "mask", "bias", "sinks")
        if (tensor := getattr(inputs, name)) is not None
    }
    return dataclasses.replace(inputs, **tensors, spec=dataclasses.replace(inputs.spec, device="cuda"))


def emitted(name: str, case: Case, *, needs_grad: bool = True) -> torch.fx.GraphModule:
    """What a lowering emits for the case on a GPU that need not be there."""
    inputs = cases.build(case, needs_grad=needs_grad)
    # Fake tensors of a device that this torch is built without must stay out of autograd, which asks the device itself.
    with torch.no_grad(), FakeTensorMode() as mode:
        return emit(by_name(name), moved(inputs, "cuda"), mode=mode)


def kernel_call(gm: torch.fx.GraphModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the attention op, nodes as their names; after it comes only getitem 0."""
    *_, kernel, item = (node for node in gm.graph.nodes if node.op == "call_function")
    assert (item.target, item.args) == (operator.getitem, (kernel, 0))
    return torch.fx.map_arg((kernel.args, kernel.kwargs), lambda node: node.name)


HALF = torch.bfloat16


def test_cudnn_gets_the_arguments_of_sdpa() -> None:
    case = Case(name="x", dtype=HALF, causal=cases.TOP_LEFT, dropout_p=0.125, scale=0.3)
    for needs_grad in (True, False):
        gm = emitted("sdpa_cudnn", case, needs_grad=needs_grad)
        assert calls(gm)[0] == aten._scaled_dot_product_cudnn_attention.default
        expected = ("q", "k", "v", None, needs_grad, 0.125, True, False)
        assert kernel_call(gm) == (expected, {"scale": 0.3})


def test_flash_gets_the_arguments_of_sdpa() -> None:
    gm = emitted("sdpa_flash", Case(name="x", dtype=HALF, heads_kv=2, dropout_p=0.1, scale=0.3))
    assert calls(gm)[0] == aten._scaled_dot_product_flash_attention.default
    assert kernel_call(gm) == (("q", "k", "v", 0.1, False, False), {"scale": 0.3})


def test_efficient_gets_the_arguments_of_sdpa() -> None:
    for needs_grad in (True, False):
        gm = emitted("sdpa_efficient", Case(name="x", causal=cases.TOP_LEFT, scale=0.3), needs_grad=needs_grad)
        assert calls(gm)[0] == aten._scaled_dot_product_efficient_attention.default
        assert kernel_call(gm) == (("q", "k", "v", None, needs_grad, 0.0, True), {"scale": 0.3})


def test_cpu_flash_gets_the_arguments_of_sdpa() -> None:
    gm = emit(
        CPU_FLASH, cases.build(Case(name="x", causal=cases.TOP_LEFT, mask="bk", mask_dtype=torch.float32, scale=0.3))
    )
    assert kernel_call(gm) == (("q", "k", "v", 0.0, True), {"attn_mask": "mask", "scale": 0.3})


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"])
def test_one_bottom_right_query_needs_no_causal_flag(name: str) -> None:
    gm = emitted(name, dataclasses.replace(BY_NAME["decode_bottom_right"], dtype=HALF))
    position = {"sdpa_flash": 4, "sdpa_cudnn": 6, "sdpa_efficient": 6}[name]
    assert kernel_call(gm)[0][position] is False


def test_flash_keeps_the_flag_for_a_bottom_right_diagonal() -> None:
    case = dataclasses.replace(BY_NAME["causal_bottom_right"], dtype=HALF)
    assert kernel_call(emitted("sdpa_flash", case))[0][4] is True


# ---- masks, heads and layouts on a GPU that is not there --------------------------------------------------------------


def test_a_bool_mask_becomes_one_of_q_dtype_for_cudnn() -> None:
    gm = emitted("sdpa_cudnn", dataclasses.replace(BY_NAME["mask_bk"], dtype=HALF))
    bias = kernel_call(gm)[0][3]
    value = named(gm, bias)
    assert (value.dtype, value.shape, value.stride(-1)) == (HALF, (2, 1, 1, 155), 1)


def test_a_mask_over_queries_alone_gets_adjacent_keys_for_cudnn() -> None:
    gm = emitted("sdpa_cudnn", dataclasses.replace(BY_NAME["mask_queries_only"], dtype=HALF))
    value = named(gm, kernel_call(gm)[0][3])
    assert (value.shape, value.stride(-1)) == ((2, 1, 73, 155), 1)


@pytest.mark.parametrize("axes", ["bhqk", "bqk", "hqk", "qk", "bk", "k", "bhk", "q k", "bq"])
@pytest.mark.parametrize("seqlen_kv", [155, 160])
def test_the_bias_of_efficient_is_expanded_and_aligned(axes: str, seqlen_kv: int) -> None:
    gm = emitted("sdpa_efficient", Case(name="x", mask=axes, seqlen_q=72, seqlen_kv=seqlen_kv))
    value = named(gm, kernel_call(gm)[0][3])
    assert value.shape == (2, 4, 72, seqlen_kv)
    *others, last = value.stride()
    assert last == 1
    assert all(stride % 8 == 0 for stride in others)
    # An aligned mask is not copied.
    assert (aten.slice_scatter.default in calls(gm)) == (seqlen_kv == 155 or axes == "bq")


def kernel_argument(inputs: Inputs, position: int) -> torch.Tensor:
    """What the memory-efficient kernel gets there: the nodes in front of it, run on the CPU."""
    with torch.no_grad(), FakeTensorMode() as mode:
        gm = emit(by_name("sdpa_efficient"), moved(inputs, "cuda"), mode=mode)
    (kernel,) = gm.graph.find_nodes(op="call_function", target=aten._scaled_dot_product_efficient_attention.default)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (kernel.args[position],)
    # The kernel draws dropout seeds, so dead-code elimination would keep it.
    gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    gm.recompile()
    return gm(*arguments(inputs))


def test_padding_a_bias_keeps_its_numbers_and_its_gradient() -> None:
    inputs = cases.build(Case(name="x", bias="hqk", seqlen_kv=155))
    bias = kernel_argument(inputs, 3)
    assert inputs.bias is not None
    assert torch.equal(bias, inputs.bias.expand(2, 4, 73, 155))
    (grad,) = torch.autograd.grad(bias.sum(), inputs.bias)
    assert torch.equal(grad, torch.full_like(inputs.bias, 2.0))


def named(gm: torch.fx.GraphModule, name: str) -> torch.Tensor:
    return next(node.meta["example_value"] for node in gm.graph.nodes if node.name == name)


REPEATS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


@pytest.mark.skipif(not REPEATS, reason="this torch's memory-efficient kernel reads K/V of fewer heads itself")
@pytest.mark.parametrize(("heads_kv", "is_view"), [(2, False), (1, True)])
def test_efficient_repeats_heads_that_it_cannot_share(heads_kv: int, is_view: bool) -> None:
    gm = emitted("sdpa_efficient", Case(name="x", heads_q=8, heads_kv=heads_kv))
    k, v = (named(gm, name) for name in kernel_call(gm)[0][1:3])
    assert k.shape == v.shape == (2, 8, 73, 64)
    assert (k.stride(1) == 0) == is_view


@pytest.mark.skipif(not REPEATS, reason="this torch's memory-efficient kernel reads K/V of fewer heads itself")
@pytest.mark.parametrize("heads_kv", [2, 1])
def test_repeated_heads_are_those_that_queries_read(heads_kv: int) -> None:
    inputs = cases.build(Case(name="x", heads_q=8, heads_kv=heads_kv))
    assert torch.equal(kernel_argument(inputs, 1), inputs.k.repeat_interleave(8 // heads_kv, dim=1))


@pytest.mark.parametrize("name", CUDA)
@pytest.mark.parametrize(
    "case",
    [
        Case(name="causal", dtype=HALF, causal=cases.TOP_LEFT, heads_kv=2),
        Case(name="bshd", dtype=HALF, layout="bshd"),
        Case(name="mask", dtype=HALF, mask="bk", seqlen_kv=155, heads_kv=2),
        Case(name="dropout", dtype=HALF, dropout_p=0.125),
        Case(name="bias", dtype=HALF, bias="hqk"),
    ],
    ids=lambda case: case.name,
)
def test_cuda_kernels_trace_forward_and_backward_without_a_gpu(name: str, case: Case) -> None:
    inputs = moved(cases.build(case), "meta")
    if by_name(name).why_not(inputs.spec, Target.fake(torch=str(torch.__version__))):
        pytest.skip("refused")
    # Kernels have one meta function for every device; "meta" is the one that autograd knows in every build.
    for tensor in inputs.differentiable:
        tensor.requires_grad_()
    module = emit(by_name(name), inputs)
    seen: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Recorder():
        out = module(*arguments(inputs))
        grads = torch.autograd.grad(out, inputs.differentiable, torch.ones_like(out))
    assert out.shape == (*inputs.q.shape[:3], inputs.v.shape[3])
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs.differentiable]
    kernel = name.removeprefix("sdpa_")
    assert f"aten._scaled_dot_product_{kernel}_attention.default" in seen
    assert f"aten._scaled_dot_product_{kernel}_attention_backward.default" in seen


@pytest.mark.parametrize("mask", [None, "qk"])
def test_efficient_makes_an_lse_beside_a_bias(mask: str | None) -> None:
    """Without one its last block of one query reads wrong rows of the bias."""
    inputs = cases.build(Case(name="x", mask=mask), needs_grad=False)
    gm = emit(by_name("sdpa_efficient"), inputs)
    assert kernel_call(gm)[0][4] is (mask is not None)


def test_efficient_gets_aligned_strides_of_axes_of_size_one() -> None:
    inputs = cases.build(Case(name="x", batch=1, heads_q=1, heads_kv=1, seqlen_q=32))
    odd = inputs.q.as_strided(inputs.q.shape, (3, 1, inputs.q.stride(2), 1))
    given = kernel_argument(dataclasses.replace(inputs, q=odd), 0)
    assert all(stride % 8 == 0 for stride in given.stride()[:3])
    assert torch.equal(given, inputs.q)


@pytest.mark.parametrize(("torch_version", "refuses"), [("2.11.0", True), ("2.13.0", False)])
def test_cudnn_of_older_torch_takes_no_symbolic_sizes_with_two_head_dims(torch_version: str, refuses: bool) -> None:
    spec = cases.build(cases.lowered(BY_NAME["head_dims_differ"], "bfloat16", HALF)).spec
    spec = dataclasses.replace(spec, device="cuda")
    symbolic = dataclasses.replace(
        spec, **{n: dataclasses.replace(getattr(spec, n), shape=("s0", *getattr(spec, n).shape[1:])) for n in "qkv"}
    )
    target = Target.fake(torch=torch_version)
    rule = "only with known sizes"
    assert rule not in str(by_name("sdpa_cudnn").why_not(spec, target))
    assert (rule in str(by_name("sdpa_cudnn").why_not(symbolic, target))) is refuses


def test_demands() -> None:
    spec = cases.build(BY_NAME["plain"]).spec
    by_kernel = {name: by_name(name).demand(spec) for name in (*CUDA, "sdpa_cpu_flash")}
    assert all(demand.last_stride_one for demand in by_kernel.values())
    assert {name: demand.alignment for name, demand in by_kernel.items()} == {
        "sdpa_cudnn": 16,
        "sdpa_flash": 16,
        "sdpa_efficient": 16,
        "sdpa_cpu_flash": 1,
    }
    assert not by_kernel["sdpa_cudnn"].zero_strides
    assert by_kernel["sdpa_flash"].zero_strides


# ---- on a real GPU ----------------------------------------------------------------------------------------------------


def gpu_cases() -> list[Case]:
    """Every case in bfloat16, and those that are run in several dtypes in float32 and float16 too."""
    in_bfloat16 = [case if case.dtype == HALF else cases.lowered(case, "bfloat16", HALF) for case in cases.FLOAT32]
    others = [case for case in CASES if case.dtype == torch.float16]
    return [*in_bfloat16, *others, *(BY_NAME[case.name.removesuffix("_float16")] for case in others)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA)
@pytest.mark.parametrize("case", gpu_cases(), ids=lambda case: case.name)
def test_cuda_kernels_are_within_the_numeric_rule(name: str, case: Case) -> None:
    inputs = cases.build(case, device="cuda")
    lowering = by_name(name)
    reasons = lowering.why_not(inputs.spec, Target.current("cuda"))
    if reasons or case.dropout_p:
        pytest.skip("; ".join(map(str, reasons)) or "dropout is random")
    if case.layout in ("last_stride", "expanded_heads", "expanded_batch"):
        inputs = contiguous(inputs)
    module = emit(lowering, inputs)
    got = numerics.with_gradients(run(module), inputs)
    numerics.assert_within_rule(got, inputs)
    # Strides of axes of size one differ at Sq = 1, and mean nothing: nobody steps along such an axis.
    strides = zip(got[0].stride(), output_value(module).stride(), got[0].shape, strict=True)
    assert all(real == fake for real, fake, size in strides if size != 1)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 64, 65, 129])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_efficient_with_shared_heads_and_a_bias(seqlen_q: int, dtype: torch.dtype) -> None:
    case = Case(name="x", dtype=dtype, heads_q=4, heads_kv=1, seqlen_q=seqlen_q, seqlen_kv=32, mask="qk")
    inputs = cases.build(case, device="cuda")
    module = emit(by_name("sdpa_efficient"), inputs)
    with torch.no_grad():
        got = run(module)(inputs)
    exact = numerics.attention(numerics.cast(inputs, torch.float64))
    assert numerics.worst(got, exact) < 0.05


_KEPT = torch.arange(24)[None, None, None] < torch.tensor([24, 10])[:, None, None, None]
#: attention that is written out, with numbers in the place of masked scores
_REPLACING: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda q, k, v, kept: (q @ k.mT).masked_fill(~kept, -1e9).softmax(-1) @ v,
    "masked_fill, -inf": lambda q, k, v, kept: (q @ k.mT).masked_fill(~kept, -torch.inf).softmax(-1) @ v,
    "where": lambda q, k, v, kept: torch.where(kept, q @ k.mT, -1e30).softmax(-1) @ v,
    "where, causal": lambda q, k, v, kept: (
        torch.where(kept & torch.ones(24, 24).tril().bool(), q @ k.mT, -1e30).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e30])
@pytest.mark.parametrize("name", _REPLACING)
def test_masked_keys_hold_anything_where_the_model_replaces_their_scores(name: str, bad: float) -> None:
    function = _REPLACING[name]
    q, k, v = (torch.randn(2, 4, 24, 16) for _ in range(3))
    given = (q, torch.where(_KEPT.mT, k, bad), v, _KEPT)
    run = compiled(function)
    torch.testing.assert_close(run(*given), function(*given))
    assert run.site.decision.lowering == "sdpa_cpu_flash"
