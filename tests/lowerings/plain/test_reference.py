"""The plain lowerings: the reference, attention untouched, in half precision and in FP8."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from attn_compiler.lowerings import Emitter, Operands, by_name
from attn_compiler.lowerings.plain import fp8_reference as reference_fp8, reference, takes
from attn_compiler.lowerings.shared.parts import score_changes
from attn_compiler.lowerings.shared.parts.site_parts import ADDED, MASKING
from attn_compiler.spec.fp8_recipe import CurrentScaling, Fp8Recipe
from attn_compiler.spec.scores import ScoreSpec, Sinks, Softcap, Unusual
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.cases import BY_NAME, CASES, Case, Inputs as InputsFp8
from tests.lowerings.emitting import arguments, calls, emit, output_value
from tests.lowerings.specs import UNLISTED
from tests.passes.compiling import compiled
from tests.spec.meanings import Inputs, allows

CPU = Target.current("cpu")
REFERENCE = by_name("reference")
SERVED = [case for case in CASES if not REFERENCE.why_not(cases.build(case).spec, CPU)]


def test_refuses_nothing_but_dropout_and_two_tensors() -> None:
    assert {case.name for case in CASES} - {case.name for case in SERVED} == {
        "dropout",
        "bias_mask",
        "everything",
        "everything_float16",
        "everything_bfloat16",
    }


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_is_within_the_numeric_rule(case: Case) -> None:
    inputs = cases.build(case)
    module = emit(REFERENCE, inputs)
    got = numerics.with_gradients(lambda given: module(*arguments(given)), inputs)
    numerics.assert_within_rule(got, inputs)


@pytest.mark.parametrize("name", ["bias_mask", "everything", "everything_bfloat16"])
def test_the_op_itself_takes_a_mask_and_a_bias(name: str) -> None:
    inputs = cases.build(BY_NAME[name])
    further = [t for t in (inputs.mask, inputs.bias, inputs.sinks) if t is not None]
    text = inputs.spec.to_text()
    got = numerics.with_gradients(
        lambda given: torch.ops.attn_compiler.reference(given.q, given.k, given.v, further, text)[0], inputs
    )
    numerics.assert_within_rule(got, inputs)


@pytest.mark.parametrize("name", ["mask_empty_rows", "additive_empty_rows", "causal_bottom_right_empty_rows"])
def test_rows_without_any_key_give_zero_and_no_gradient(name: str) -> None:
    inputs = cases.build(BY_NAME[name])
    module = emit(REFERENCE, inputs)
    out, grad_q, grad_k, grad_v = numerics.with_gradients(lambda given: module(*arguments(given)), inputs)
    empty = slice(0, 92 - 73) if "bottom_right" in name else slice(None, None, 5)
    assert not out[:, :, empty].any()
    assert not grad_q[:, :, empty].any()
    assert all(grad.isfinite().all() for grad in (grad_q, grad_k, grad_v))
    lse = torch.ops.attn_compiler.reference(*arguments(inputs)[:3], arguments(inputs)[3:], inputs.spec.to_text())[1]
    assert (lse[:, :, empty] == -torch.inf).all()


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_rows_that_finite_numbers_mask_attend_to_all_keys_alike(fill: float) -> None:
    """As a softmax does. An lse near such a number can't hold the logarithm of how many keys there are."""
    inputs = cases.build(BY_NAME["additive_empty_rows"])
    assert inputs.mask is not None
    masked = dataclasses.replace(inputs, mask=inputs.mask.clamp(min=fill))
    module = emit(REFERENCE, masked)
    got = numerics.with_gradients(lambda given: module(*arguments(given)), masked)
    repeats = masked.q.shape[1] // masked.k.shape[1]

    def plain(given: cases.Inputs) -> torch.Tensor:
        k, v = (x.repeat_interleave(repeats, 1) for x in (given.k, given.v))
        return F.softmax(given.q @ k.mT * masked.spec.score.scale + given.mask, -1) @ v

    for mine, right in zip(got, numerics.with_gradients(plain, masked), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)


def test_a_sink_alone_takes_all_weight() -> None:
    inputs = cases.build(BY_NAME["sinks_empty_rows"], needs_grad=False)
    assert inputs.mask is not None
    assert inputs.sinks is not None
    out, lse = torch.ops.attn_compiler.reference(
        *arguments(inputs)[:3], [inputs.mask, inputs.sinks], inputs.spec.to_text()
    )
    assert not out[:, :, ::5].any()
    torch.testing.assert_close(lse[:, :, ::5], inputs.sinks.view(1, -1, 1).expand_as(lse[:, :, ::5]))


def test_the_causal_mask_is_that_of_the_mask_kind() -> None:
    for kind in (cases.Causal(alignment=cases.TOP_LEFT), cases.Causal(alignment=cases.BOTTOM_RIGHT)):
        got = reference._causal(kind, torch.empty(3, 5))
        expected = [[allows(kind, 0, 0, q, k, Inputs(seqlen_q=3, seqlen_kv=5)) for k in range(5)] for q in range(3)]
        assert got.tolist() == expected


def test_emits_one_leaf_op() -> None:
    inputs = cases.build(BY_NAME["sinks_empty_rows"])
    module = emit(REFERENCE, inputs)
    assert calls(module) == [torch.ops.attn_compiler.reference.default, operator.getitem]
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.attn_compiler.reference.default)
    assert [argument.name for argument in node.args[3]] == ["mask", "sinks"]
    assert node.args[4] == inputs.spec.to_text()
    real = module(*arguments(inputs))
    assert (real.shape, real.stride()) == (output_value(module).shape, output_value(module).stride())


def test_what_it_refuses_and_why() -> None:
    spec = cases.build(BY_NAME["mask_bk"]).spec
    unusual = dataclasses.replace(spec, score=ScoreSpec(scale=1.0, changes=(Unusual(what="top-8 keys"),)))
    unlisted = dataclasses.replace(spec, mask=UNLISTED)
    weights = dataclasses.replace(spec, returns_weights=True)
    dropout = dataclasses.replace(spec, score=ScoreSpec(scale=1.0, dropout_p=0.1))
    mixed = dataclasses.replace(spec, k=dataclasses.replace(spec.k, dtype="bfloat16"))
    for refused, word in (
        (unusual, "top-8"),
        (unlisted, "a new kind of mask"),
        (weights, "output_attentions=False"),
        (dropout, "dropout"),
        (mixed, "k bfloat16"),
    ):
        (reason,) = REFERENCE.why_not(refused, CPU)
        assert word in str(reason)


def test_runs_on_every_machine() -> None:
    assert not REFERENCE.unavailable(CPU)
    assert not REFERENCE.unavailable(Target.fake())
    assert not REFERENCE.demand(cases.build(BY_NAME["plain"]).spec).last_stride_one


def test_an_empty_batch_may_stand_for_the_heads() -> None:
    """So does the first of three dimensions, where a graph of symbolic sizes is called with none."""
    grad = torch.zeros(1, 0, 3, 4)
    assert reference.repeated(grad, torch.zeros(1, 0, 5, 4)).shape == (1, 0, 3, 4)
    assert reference._folded(grad, torch.zeros(1, 0, 5, 4)).shape == (1, 0, 3, 4)


RECIPES = {
    "head": Fp8Recipe(),
    "accurate": Fp8Recipe(scaling=CurrentScaling(granularity="block"), smooth_k=True, hadamard=True),
}


FP8_REFERENCE = by_name("reference_fp8")


def half(case: Case, recipe: str) -> InputsFp8:
    inputs = cases.build(dataclasses.replace(case, dtype=torch.bfloat16))
    return dataclasses.replace(inputs, spec=dataclasses.replace(inputs.spec, fp8=RECIPES[recipe]))


FP8_SERVED = [case for case in CASES if not FP8_REFERENCE.why_not(half(case, "head").spec, CPU)]


def test_refuses_what_fp8_or_the_reference_does() -> None:
    refused = {case.name for case in CASES if case.dtype == torch.float32} - {case.name for case in FP8_SERVED}
    few_queries, odd_head_dims = (
        {"one_key", "decode", "decode_bottom_right", "mask_decode"},
        {"head_dim_72", "head_dim_odd"},
    )
    assert refused == few_queries | odd_head_dims | {"bias_mask", "everything", "dropout"}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "case", [case for case in FP8_SERVED if case.dtype == torch.float32], ids=lambda case: case.name
)
def test_results_and_gradients_are_near_the_exact_ones(case: Case) -> None:
    """FP8 rounds by 2**-4; of what is rounded apart, sums are nearer."""
    for recipe in RECIPES:
        inputs = half(case, recipe)
        if FP8_REFERENCE.why_not(inputs.spec, CPU):
            continue
        module = emit(FP8_REFERENCE, inputs)
        got = numerics.with_gradients(lambda given: module(*arguments(given)), inputs)  # noqa: B023
        exact = numerics.with_gradients(numerics.attention, numerics.cast(inputs, torch.float32))
        for mine, right in zip(got, exact, strict=True):
            error = (mine.float() - right).square().mean().sqrt()
            # Where scores are large, what rounding adds to them is too.
            share = 0.08 if case.scale is None else 0.15
            assert float(error) <= share * float(right.square().mean().sqrt()) + 1e-4


def test_weights_are_rounded() -> None:
    """Without that, what is left is the rounding of q, k and v alone: smaller by a third."""
    inputs = half(BY_NAME["causal"], "head")
    out = emit(FP8_REFERENCE, inputs)(*arguments(inputs))
    with mock.patch.object(reference_fp8, "WEIGHT", 2.0**-9):
        coarse = emit(FP8_REFERENCE, inputs)(*arguments(inputs))
    exact = numerics.attention(numerics.cast(inputs, torch.float32))
    assert numerics.worst(coarse, exact) > 3 * numerics.worst(out, exact) > 0


def test_the_last_keys_come_first() -> None:
    """A first key with nearly all of the weight, visited first, would leave nothing of others. Now it does in its own tile alone."""
    logits, v = torch.zeros(1, 1, 1, 512), torch.ones(1, 1, 512, 1)
    logits[..., 0], v[:, :, 0] = 13.0, 0.0
    out, _ = reference_fp8._attention(logits, None, v, torch.float8_e4m3fn)
    assert float(out) == pytest.approx((512 - reference_fp8.TILE) / (511 + math.exp(13.0)), rel=0.02)


def test_weights_have_the_recipes_format() -> None:
    inputs = half(BY_NAME["causal"], "head")
    spec = dataclasses.replace(inputs.spec, fp8=Fp8Recipe(forward_format="e5m2"))
    with mock.patch.object(reference_fp8, "_attention", wraps=reference_fp8._attention) as attended:
        for each in (inputs, dataclasses.replace(inputs, spec=spec)):
            emit(FP8_REFERENCE, each)(*arguments(each))
    assert [call.args[3] for call in attended.call_args_list] == [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("lengths", [(70, 45), (200, 300)], ids=["one block", "several"])
def test_lengths_that_are_not_known(lengths: tuple[int, int]) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    function = compiled(attention, lowering="reference_fp8", fp8_recipe=Fp8Recipe())
    for length in lengths:
        given = [torch.randn(1, heads, length, 32).half() for heads in (2, 1, 1)]
        for x in given:
            torch._dynamo.mark_dynamic(x, 2)
        exact = attention(*(x.float() for x in given))
        assert float((function(*given).float() - exact).square().mean().sqrt()) < 0.03
    # One graph served both.
    assert function.site.decision.lowering == "reference_fp8"


UNTOUCHED = by_name("untouched")


def test_takes_anything_anywhere() -> None:
    spec = cases.build(BY_NAME["everything"]).spec
    unlisted = dataclasses.replace(spec, mask=UNLISTED, returns_weights=True)
    for target in (Target.fake(), Target.fake(device="cpu"), Target.fake(sm=0)):
        assert UNTOUCHED.unavailable(target) == []
        assert UNTOUCHED.why_not(unlisted, target) == []


def test_asks_for_no_layout_and_emits_nothing() -> None:
    spec = cases.build(BY_NAME["plain"]).spec
    demand = UNTOUCHED.demand(spec)
    assert (demand.last_stride_one, demand.alignment, demand.zero_strides) == (False, 1, True)
    node = fx.Graph().placeholder("q")
    with pytest.raises(TypeError, match="never emitted"):
        UNTOUCHED.emit(cast("Emitter", None), spec, Operands(q=node, k=node, v=node))
    with pytest.raises(TypeError, match="gives no lse"):
        UNTOUCHED.emit_with_lse(cast("Emitter", None), spec, Operands(q=node, k=node, v=node))


# What attention in plain PyTorch takes, it computes.
DTYPES = {name: getattr(torch, name) for name in takes.MATH.dtypes}
#: how a case is told of a change that is taken
CHANGES = {Softcap: {"softcap": 5.0}, Sinks: {"sinks": True}}


def test_it_takes_every_part_and_runs_everywhere() -> None:
    for taken in (takes.MATH, takes.REFERENCE):
        assert taken.parts == MASKING | ADDED
        assert (taken.sms, taken.head_dims, taken.tensors) == (None, None, None)
    assert set(takes.MATH.changes) == set(CHANGES)


def test_the_reference_takes_more_shapes_and_no_dropout() -> None:
    assert dataclasses.replace(takes.REFERENCE, any_shape=False, dropout=True) == takes.MATH
    dropout, empty = (cases.build(Case(name="taken", **{k: x})).spec for k, x in (("dropout_p", 0.5), ("seqlen_kv", 0)))
    refusals = [[bool(by_name(name).why_not(spec, CPU)) for spec in (dropout, empty)] for name in ("math", "reference")]
    assert refusals == [[False, True], [True, False]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["math", "reference"])
def test_what_is_taken_is_computed(name: str, change: type, dtype: str) -> None:
    case = Case(name="taken", seqlen_q=9, seqlen_kv=13, head_dim=16, dtype=DTYPES[dtype], **CHANGES[change])
    inputs = cases.build(case)
    lowering = by_name(name)
    assert lowering.why_not(inputs.spec, CPU) == []
    module = emit(lowering, inputs)
    numerics.assert_within_rule(numerics.with_gradients(lambda given: module(*arguments(given)), inputs), inputs)


def test_each_change_of_each_score_is_taken() -> None:
    assert set(score_changes.KINDS) <= set(takes.MATH.changes)
