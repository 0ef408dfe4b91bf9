from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings import by_name
from attn_compiler.spec.scores import ScoreSpec, Unusual
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.cases import BY_NAME, CASES, Case
from tests.lowerings.emitting import arguments, calls, emit, output_value
from tests.lowerings.specs import UNLISTED
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
