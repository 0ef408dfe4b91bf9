"""Plain products: ops, plans, and values that were absorbed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.plain import ops as plain_ops, reference
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import ScoreSpec, Unusual
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.cases import BY_NAME, CASES, Case, Inputs
from tests.lowerings.decode.test_latent import latent_attention, latent_inputs, latent_spec
from tests.lowerings.emitting import arguments, calls, emit, output_value
from tests.lowerings.specs import UNLISTED
from tests.passes.compiling import compiled
from tests.thinned import in_full

CPU = Target.current("cpu")
MATH = by_name("math")
SERVED = [case for case in CASES if not MATH.why_not(cases.build(case).spec, CPU)]


def test_refuses_only_two_tensors() -> None:
    refused = {case.name for case in CASES} - {case.name for case in SERVED}
    assert refused == {"bias_mask", "everything", "everything_float16", "everything_bfloat16"}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", [case for case in SERVED if not case.dropout_p], ids=lambda case: case.name)
def test_is_within_the_numeric_rule(case: Case) -> None:
    inputs = cases.build(case)
    module = emit(MATH, inputs)
    got = numerics.with_gradients(lambda given: module(*arguments(given)), inputs)
    numerics.assert_within_rule(got, inputs)


@pytest.mark.parametrize(
    "name",
    in_full(
        ["causal", "decode", "mask_empty_rows", "sinks", "softcap_mask_gqa", "layout_bshd_gqa"],
        daily=("mask_empty_rows", "sinks", "softcap_mask_gqa"),
    ),
)
def test_is_compiled_with_gradients(name: str) -> None:
    inputs = cases.build(BY_NAME[name])
    compiled = torch.compile(emit(MATH, inputs), backend="inductor", fullgraph=True)
    numerics.assert_within_rule(numerics.with_gradients(lambda given: compiled(*arguments(given)), inputs), inputs)


@pytest.mark.parametrize("name", ["mask_empty_rows", "additive_empty_rows", "causal_bottom_right_empty_rows"])
def test_rows_without_any_key_give_zero_and_finite_gradients(name: str) -> None:
    inputs = cases.build(BY_NAME[name])
    module = emit(MATH, inputs)
    out, *grads = numerics.with_gradients(lambda given: module(*arguments(given)), inputs)
    empty = slice(0, 92 - 73) if "bottom_right" in name else slice(None, None, 5)
    assert not out[:, :, empty].any()
    assert all(grad.isfinite().all() for grad in grads)


def test_keys_and_values_of_fewer_heads_are_not_repeated() -> None:
    inputs = cases.build(BY_NAME["gqa"], needs_grad=False)
    module = emit(MATH, inputs)
    sizes = [node.meta["example_value"].numel() for node in module.graph.nodes if node.op == "call_function"]
    scores = 2 * 8 * 73 * 73
    assert max(sizes) == scores
    shapes = {tuple(n.meta["example_value"].shape) for n in module.graph.nodes if n.target is torch.transpose}
    assert shapes == {(2, 2, 64, 73)}
    assert output_value(module).shape == (2, 8, 73, 64)


def test_dropout_drops_and_keeps_the_mean() -> None:
    case = Case(name="x", dropout_p=0.25, seqlen_q=64, seqlen_kv=512, head_dim=8)
    inputs = cases.build(case, needs_grad=False)
    ones = dataclasses.replace(inputs, v=torch.ones_like(inputs.v))
    module = emit(MATH, ones)
    torch.manual_seed(0)
    first = module(*arguments(ones))
    assert not torch.equal(first, module(*arguments(ones)))
    torch.manual_seed(0)
    assert torch.equal(first, module(*arguments(ones)))
    assert abs(float(first.mean()) - 1) < 0.02


def test_scores_are_float32() -> None:
    module = emit(MATH, cases.build(BY_NAME["causal_bfloat16"]))
    (softmax,) = module.graph.find_nodes(op="call_function", target=torch.softmax)
    assert softmax.meta["example_value"].dtype == torch.float32
    assert output_value(module).dtype == torch.bfloat16
    assert torch.matmul in calls(module)


def test_what_it_refuses_and_where_it_runs() -> None:
    spec = cases.build(BY_NAME["mask_bk"]).spec
    unusual = dataclasses.replace(spec, score=ScoreSpec(scale=1.0, changes=(Unusual(what="top-8 keys"),)))
    unlisted = dataclasses.replace(spec, mask=UNLISTED)
    weights = dataclasses.replace(spec, returns_weights=True)
    for refused, word in ((unusual, "top-8"), (unlisted, "a new kind of mask"), (weights, "output_attentions=False")):
        (reason,) = MATH.why_not(refused, CPU)
        assert word in str(reason)
    assert MATH.unavailable(Target.fake()) == MATH.unavailable(CPU) == []
    assert not MATH.demand(spec).last_stride_one


# The leaf op of the reference as PyTorch sees it.
NAMES = ["causal", "gqa", "bias_heads", "sinks", "causal_bfloat16"]


def built(name: str) -> tuple[Inputs, list[torch.Tensor]]:
    """A case, and the operands of its op."""
    inputs = cases.build(BY_NAME[name])
    return inputs, [x for x in (inputs.mask, inputs.bias, inputs.sinks) if x is not None]


def detached(inputs: Inputs) -> list[torch.Tensor]:
    return [x.detach() for x in (inputs.q, inputs.k, inputs.v)]


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_is_the_reference_s_in_the_model_s_dtype(name: str) -> None:
    inputs, operands = built(name)
    given, operands = detached(inputs), [x.detach() for x in operands]
    out, lse = torch.ops.attn_compiler.reference(*given, operands, inputs.spec.to_text())
    exact_out, exact_lse = reference.forward(*given, operands, inputs.spec)
    assert out.dtype == inputs.q.dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, exact_out.to(out.dtype))
    assert torch.equal(lse, exact_lse.to(lse.dtype))


@pytest.mark.parametrize("name", ["bias_heads", "sinks"])
def test_gradients_of_operands_come_in_their_dtype_and_order(name: str) -> None:
    inputs, operands = built(name)
    out, lse = torch.ops.attn_compiler.reference(inputs.q, inputs.k, inputs.v, operands, inputs.spec.to_text())
    wanted = (inputs.q, inputs.k, inputs.v, *operands)
    got = torch.autograd.grad((out, lse), wanted, (torch.ones_like(out), torch.ones_like(lse)))
    given = (*detached(inputs), [x.detach() for x in operands])
    *exact, exact_operands = reference.backward(torch.ones_like(out), torch.ones_like(lse), *given, inputs.spec)
    for gradient, tensor, right in zip(got, wanted, (*exact, *exact_operands), strict=True):
        assert (gradient.dtype, gradient.shape) == (tensor.dtype, tensor.shape)
        torch.testing.assert_close(gradient, right.to(tensor.dtype))


def test_operands_are_those_of_the_spec() -> None:
    inputs, operands = built("bias_heads")
    text = inputs.spec.to_text()
    assert plain_ops._reference_differentiable(operands, text) == [True]
    with pytest.raises(ValueError, match="the spec has 1 operands"):
        plain_ops._reference_differentiable([*operands, operands[0]], text)


# Attention over the latent, as plain nodes.
def refused(spec: AttentionSpec) -> str:
    return "; ".join(map(str, by_name("absorbed").why_not(spec, CPU)))


def test_it_runs_everywhere_and_reads_neither_k_nor_v() -> None:
    absorbed = by_name("absorbed")
    assert absorbed.unavailable(CPU) == absorbed.unavailable(Target.fake()) == []
    assert absorbed.cannot_package() == []
    spec = latent_spec()
    assert refused(spec) == ""
    broken = dataclasses.replace(spec.k, strides=(1, 1, 1, 2))
    assert absorbed.demand(spec).broken_by(broken) is None


def test_what_is_refused() -> None:
    assert "k and v are linear maps of one latent" in refused(dataclasses.replace(latent_spec(), latent=None))
    assert "no gradient is needed" in refused(latent_spec(needs_grad=True))
    # So many queries that to make k and v once costs less.
    assert "queries" in refused(latent_spec(queries=1024))


@pytest.mark.in_turns
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_site(queries: int, dtype: torch.dtype) -> None:
    inputs = latent_inputs(queries, dtype)
    function = compiled(latent_attention, lowering="absorbed", verify=True)
    with torch.no_grad():
        found, expected = function(*inputs), latent_attention(*inputs)
    close = {"atol": 2e-6, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(found, expected, **close)
    assert function.site.decision.lowering == "absorbed"
    assert not {"linear", "scaled_dot_product_attention"} & set(function.calls)


def test_keys_that_no_query_sees_may_hold_anything() -> None:
    inputs = latent_inputs(1)
    with torch.no_grad():
        expected = latent_attention(*inputs)
        for x in inputs[1:3]:
            x[:, :, 60:] = torch.nan
        found = compiled(latent_attention, lowering="absorbed")(*inputs)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


def test_half_precision_is_float32_inside() -> None:
    inputs = latent_inputs(1, torch.float16)
    with torch.no_grad():
        found = compiled(latent_attention, lowering="absorbed")(*inputs)
        exact = latent_attention(*(x.double() if x.is_floating_point() else x for x in inputs))
        own = (latent_attention(*inputs).double() - exact).norm()
    assert found.dtype == torch.float16
    assert (found.double() - exact).norm() <= own
