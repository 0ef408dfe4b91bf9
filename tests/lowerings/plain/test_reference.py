from __future__ import annotations

import dataclasses
import operator

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.plain import reference
from attn_compiler.spec.scores import ScoreSpec, Unusual
from attn_compiler.spec.target import Target
from tests import cases, numerics
from tests.cases import BY_NAME, CASES, Case
from tests.lowerings.emitting import arguments, calls, emit, output_value
from tests.lowerings.specs import UNLISTED
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
