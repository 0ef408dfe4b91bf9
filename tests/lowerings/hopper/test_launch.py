"""The kernel for Hopper, run in PyTorch on the arguments of its launch (gluon_in_torch.py), and in the interpreter the one after it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.hopper import launch, plan
from attn_compiler.lowerings.shared.calls.arguments import prepare
from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.lowerings.shared.parts.kernel_plan import Band, Call, head_dim_sums
from attn_compiler.lowerings.triton import launch as triton_launch
from tests.lowerings import kernel_problems
from tests.lowerings.hopper import any_size, compiled_ahead, problems
from tests.lowerings.kernel_cases import BY_NAME, Case
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

# The kernel for Hopper, run in PyTorch on the arguments of its launch (gluon_in_torch.py), and in the interpreter the one after it.
_CAUSAL: Any = {"band": Band(right=0)}
_SIZES: Any = {"seqlen_q": 200, "seqlen_kv": 300, "needs_grad": False}
_EVEN: Any = {"seqlen_q": 200, "seqlen_kv": 200, "needs_grad": False}

CASES = (
    Case(name="hopper plain", **_SIZES),
    Case(name="hopper causal", **_EVEN, **_CAUSAL),
    Case(name="hopper causal, more keys", **_SIZES, **_CAUSAL),
    Case(name="hopper from the end", band=Band(right=0, from_end=True), **_SIZES),
    Case(name="hopper strict", band=Band(right=-1), **_EVEN),
    Case(name="hopper window", band=Band(left=40, right=7), **_SIZES),
    Case(name="hopper window that none is in", band=Band(left=-290, right=400), **_SIZES),
    Case(name="hopper padding left", keys="left", **_SIZES, **_CAUSAL),
    Case(name="hopper padding right", keys="right", **_SIZES),
    Case(name="hopper a row without keys", keys="none", **_SIZES),
    Case(name="hopper holes", keys="holes", **_EVEN, **_CAUSAL),
    Case(name="hopper few pairs", keys="left", few_pairs=True, seqlen_q=70, seqlen_kv=130, needs_grad=False),
    Case(name="hopper intervals", rows=True, **_SIZES),
    Case(name="hopper documents", documents=True, **_EVEN, **_CAUSAL),
    Case(name="hopper all of a mask", documents=True, rows=True, keys="holes", band=Band(left=150, right=3), **_SIZES),
    Case(name="hopper slopes", slopes=True, **_EVEN, **_CAUSAL),
    Case(name="hopper softcap, sinks", softcap=5.0, sinks=True, **_EVEN, **_CAUSAL),
    Case(name="hopper sinks without keys", sinks=True, keys="none", **_SIZES),
    Case(name="hopper slopes, softcap", slopes=True, softcap=5.0, **_EVEN, **_CAUSAL),
    Case(name="hopper 96", head_dim=96, **_EVEN, **_CAUSAL),
    Case(name="hopper 200 and 136", head_dim=200, head_dim_v=136, keys="left", **_SIZES, **_CAUSAL),
    Case(name="hopper 256", head_dim=256, **_EVEN, **_CAUSAL),
    Case(name="hopper 192 and 128", head_dim=192, head_dim_v=128, **_EVEN),
    Case(name="hopper one query", seqlen_q=1, seqlen_kv=130, needs_grad=False),
    Case(name="hopper bhsd", layout="bhsd", **_EVEN, **_CAUSAL),
    Case(name="hopper one head", batch=1, heads_q=1, heads_kv=1, layout="bhsd", **_EVEN, **_CAUSAL),
    Case(name="hopper split projection", layout="sb(h+2hg)d", heads_q=4, heads_kv=2, **_EVEN),
    Case(name="hopper expanded heads", layout="expanded_heads", heads_q=2, heads_kv=2, **_EVEN),
)

_LONG: Any = {"seqlen_q": 200, "seqlen_kv": 304, "needs_grad": False}
#: with a bias, or numbers by distance
ADDED = (
    Case(name="hopper bias", bias="hqk", **_LONG),
    Case(name="hopper bias of each batch row", bias="bhqk", heads_q=4, heads_kv=2, **_LONG),
    Case(name="hopper bias of all heads", bias="bqk", **_LONG, **_CAUSAL),
    Case(name="hopper bias of all", bias="qk", **_EVEN, **_CAUSAL),
    Case(name="hopper bias, padding left", bias="hqk", keys="left", **_LONG, **_CAUSAL),
    Case(name="hopper bias, a row without keys", bias="hqk", keys="none", **_LONG),
    Case(name="hopper bias, documents", bias="bhqk", documents=True, **_EVEN, **_CAUSAL),
    Case(name="hopper bias, window, sinks", bias="hqk", band=Band(left=40, right=7), sinks=True, **_LONG),
    Case(name="hopper bias, slopes", bias="hqk", slopes=True, **_EVEN, **_CAUSAL),
    Case(name="hopper bias, softcap", bias="hqk", softcap=5.0, **_EVEN),
    Case(name="hopper bias, 128", bias="hqk", head_dim=128, heads_q=4, heads_kv=1, **_LONG),
    Case(name="hopper bias, 256", bias="hqk", head_dim=256, keys="left", **_LONG),
    Case(
        name="hopper bias, few pairs",
        bias="qk",
        keys="left",
        few_pairs=True,
        seqlen_q=70,
        seqlen_kv=136,
        needs_grad=False,
    ),
    Case(name="hopper bias, one query", bias="hqk", seqlen_q=1, seqlen_kv=136, needs_grad=False),
    Case(name="hopper distances", distances=2, **_SIZES),
    Case(name="hopper distances of all heads", distances=1, heads_q=4, heads_kv=2, **_EVEN, **_CAUSAL),
    Case(name="hopper distances, more queries", distances=2, seqlen_q=333, seqlen_kv=77, needs_grad=False),
    Case(name="hopper distances, padding left", distances=2, keys="left", **_SIZES, **_CAUSAL),
    Case(name="hopper distances, softcap, sinks", distances=2, softcap=5.0, sinks=True, **_EVEN),
    Case(name="hopper distances, 128", distances=2, head_dim=128, **_SIZES),
    Case(name="hopper distances, one query", distances=2, seqlen_q=1, seqlen_kv=130, needs_grad=False),
)

#: with a dense mask
MASKED = (
    Case(name="hopper mask", mask="bhqk", heads_q=4, heads_kv=2, **_SIZES),
    Case(name="hopper mask of all heads", mask="bqk", **_EVEN, **_CAUSAL),
    Case(name="hopper mask of all batch rows", mask="hqk", **_SIZES),
    Case(name="hopper mask of keys", mask="hk", **_SIZES),
    Case(name="hopper mask of queries", mask="bq", **_SIZES),
    Case(name="hopper mask, padding left, documents", mask="qk", keys="left", documents=True, **_EVEN, **_CAUSAL),
    Case(name="hopper mask, bias, 128", mask="qk", bias="hqk", head_dim=128, **_LONG),
    Case(name="hopper mask, 256", mask="bqk", head_dim=256, **_SIZES),
    Case(name="hopper mask, few pairs", mask="bqk", few_pairs=True, seqlen_q=20, seqlen_kv=130, needs_grad=False),
)

_WIDE: Any = {"head_dim": 512}
#: head dims above 256
WIDE = (
    Case(name="hopper wide", **_WIDE, **_SIZES),
    Case(name="hopper wide causal", **_WIDE, **_EVEN, **_CAUSAL),
    Case(name="hopper wide from the end", band=Band(right=0, from_end=True), **_WIDE, **_SIZES),
    Case(name="hopper wide window", band=Band(left=40, right=7), **_WIDE, **_SIZES),
    Case(name="hopper wide padding left, groups", heads_q=4, heads_kv=2, keys="left", **_WIDE, **_SIZES, **_CAUSAL),
    Case(name="hopper wide sinks without keys", sinks=True, keys="none", **_WIDE, **_SIZES),
    Case(
        name="hopper wide all of a mask",
        documents=True,
        rows=True,
        keys="holes",
        band=Band(left=150, right=3),
        **_WIDE,
        **_SIZES,
    ),
    Case(name="hopper wide softcap, sinks", softcap=5.0, sinks=True, **_WIDE, **_EVEN, **_CAUSAL),
    Case(name="hopper wide slopes", slopes=True, **_WIDE, **_EVEN, **_CAUSAL),
    Case(name="hopper wide mask", mask="bqk", **_WIDE, **_SIZES),
    Case(name="hopper wide one query", seqlen_q=1, seqlen_kv=130, needs_grad=False, **_WIDE),
    Case(name="hopper wide bhsd", layout="bhsd", **_WIDE, **_EVEN, **_CAUSAL),
    Case(name="hopper wide 384 and 320", head_dim=384, head_dim_v=320, keys="left", **_SIZES, **_CAUSAL),
    Case(name="hopper wide 320 and 128", head_dim=320, head_dim_v=128, **_EVEN, **_CAUSAL),
    Case(name="hopper wide 200 and 512", head_dim=200, head_dim_v=512, **_EVEN, **_CAUSAL),
)

#: head dims that are sums of powers of two
SUMMED = (
    Case(name="hopper summed 72", head_dim=72, **_SIZES),
    Case(name="hopper summed 80", head_dim=80, **_EVEN, **_CAUSAL),
    Case(name="hopper summed 80, padding left", head_dim=80, keys="left", **_SIZES, **_CAUSAL),
    Case(name="hopper summed 80, bhsd", head_dim=80, layout="bhsd", **_EVEN, **_CAUSAL),
    Case(name="hopper summed 88, documents", head_dim=88, documents=True, **_EVEN, **_CAUSAL),
    Case(name="hopper summed 96", head_dim=96, **_EVEN, **_CAUSAL),
    Case(name="hopper summed 96, window", head_dim=96, band=Band(left=40, right=7), **_SIZES),
    Case(name="hopper summed 96, a row without keys", head_dim=96, keys="none", **_SIZES),
    Case(name="hopper summed 112, groups", head_dim=112, heads_q=4, heads_kv=2, keys="right", **_SIZES),
    Case(name="hopper summed 112, softcap, sinks", head_dim=112, softcap=5.0, sinks=True, **_EVEN, **_CAUSAL),
    Case(name="hopper summed 112, slopes", head_dim=112, slopes=True, **_EVEN, **_CAUSAL),
    Case(name="hopper summed 64 and 80", head_dim=64, head_dim_v=80, **_EVEN),
    Case(name="hopper summed 96 and 64, intervals", head_dim=96, head_dim_v=64, rows=True, **_SIZES),
    Case(name="hopper summed 192 and 128", head_dim=192, head_dim_v=128, keys="left", **_SIZES, **_CAUSAL),
)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("hopper "))
def test_attention_by_its_definition(case: Case) -> None:
    problem = problems.build(case)
    kernel_problems.assert_within_rule(problems.outputs(problem), problem)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", [*ADDED, *MASKED], ids=lambda case: case.name.removeprefix("hopper "))
def test_what_is_added_by_its_definition(case: Case) -> None:
    problem = problems.build(case)
    kernel_problems.assert_within_rule(problems.outputs(problem), problem)


@pytest.mark.parametrize("bias", ["hqk", "bhqk"])
def test_a_bias_of_minus_infinity_masks_what_it_is_added_to(bias: str) -> None:
    """Single pairs, all keys of a tile, and all keys of a query, which has no pair then."""
    problem = problems.build(Case(name=f"hopper bias of -inf {bias}", bias=bias, heads_q=4, heads_kv=2, **_LONG))
    added = problem.named["bias"]
    with torch.no_grad():
        added[torch.rand(added.shape, generator=torch.Generator().manual_seed(0)) < 0.3] = -torch.inf
        added[..., 3, :] = -torch.inf
        added[..., 5:90, :128] = -torch.inf
    out, lse = problems.outputs(problem)
    q, k, v = (x.double() for x in (problem.q, problem.k, problem.v))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT * Call.from_text(problem.text).spec.score.scale + added.double()
    # A query without a pair has an output of 0.
    right = scores.softmax(-1).nan_to_num(0) @ v
    torch.testing.assert_close(out.double(), right, atol=2e-5, rtol=0)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=2e-5, rtol=0)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("case", SUMMED, ids=lambda case: case.name.removeprefix("hopper summed "))
def test_head_dims_that_are_sums(case: Case) -> None:
    with problems.summed():
        problem = problems.build(case)
        found, _ = problems.launched(problem, programs=3)
        how = found["attention_forward_sm90"].numbers["HOW"]
        assert head_dim_sums(Call.from_text(problem.text).spec) == (how.QK_ALL, how.V_ALL)
        kernel_problems.assert_within_rule(problems.outputs(problem), problem)


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name.removeprefix("hopper "))
def test_wide_heads(case: Case) -> None:
    problem = problems.build(case)
    found, _ = problems.launched(problem, programs=3)
    assert "attention_forward_wide_sm90" in found
    kernel_problems.assert_within_rule(problems.outputs(problem), problem)


@pytest.mark.parametrize(("head_dim", "part"), [(512, 256), (384, 128)])
def test_parts_of_wide_heads(head_dim: int, part: int) -> None:
    problem = problems.build(Case(name=f"hopper wide {part}", head_dim=head_dim, keys="left", **_SIZES, **_CAUSAL))
    found, _ = problems.launched(problem, programs=3)
    assert part == found["attention_forward_wide_sm90"].numbers["HOW"].PART
    kernel_problems.assert_within_rule(problems.outputs(problem), problem)


@pytest.mark.parametrize("first", [0, 256])
def test_values_of_any_pass_that_are_not_used_are_computed_without(first: int) -> None:
    problem = problems.build(Case(name=f"hopper wide marked {first}", keys="left", **_WIDE, **_SIZES))
    with torch.no_grad():
        problem.v.nan_to_num_(1.0)
        problem.v[1, :, :, first : first + 8] = torch.where(problem.named["keys"][1, None, :, None], 0.5, torch.nan)
    _assert_second_row_is_computed_again(problem)


def _assert_second_row_is_computed_again(problem: kernel_problems.Problem) -> None:
    _, lse = problems.in_torch(problem)
    assert not lse[0].isnan().any()
    assert lse[1].isnan().all()
    out, lse = problems.outputs(problem)
    assert not out.isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_any_number_of_programs_shares_the_blocks(programs: int) -> None:
    problem = problems.build(Case(name=f"hopper programs {programs}", keys="left", **_EVEN, **_CAUSAL))
    kernel_problems.assert_within_rule(problems.outputs(problem, programs=programs), problem)


def test_three_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BLOCKS", {64: plan.THREE})
    for further in ({"keys": "left"}, {"documents": True}, {}):
        given: dict[str, Any] = {**_EVEN, "seqlen_q": 400, "seqlen_kv": 400, **_CAUSAL, **further}
        problem = problems.build(Case(name=f"hopper three {sorted(further)}", **given))
        kernel_problems.assert_within_rule(problems.outputs(problem), problem)


@pytest.mark.parametrize("overlaps", [False, True])
def test_overlapping_or_not(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BLOCKS", {64: dataclasses.replace(plan.BLOCKS[64], overlaps=overlaps)})
    problem = problems.build(Case(name=f"hopper overlaps {overlaps}", **_EVEN, **_CAUSAL))
    kernel_problems.assert_within_rule(problems.outputs(problem), problem)


def test_values_that_are_not_used_are_computed_without() -> None:
    problem = problems.build(Case(name="hopper marked", keys="left", **_SIZES))
    # The second row's keys begin in the middle of a tile, whose other values are NaN.
    _assert_second_row_is_computed_again(problem)


def test_rows_that_were_right_are_not_computed_again() -> None:
    problem = problems.build(Case(name="hopper right at once", keys="left", **_SIZES))
    before, _ = problems.in_torch(problem)
    before = before.clone()
    after, _ = problems.outputs(problem)
    assert torch.equal(before[0], after[0])


@pytest.mark.parametrize(
    ("further", "leaks"),
    [
        ({}, False),
        (_CAUSAL, False),
        ({"band": Band(right=3)}, True),
        ({"band": Band(left=30, right=0)}, True),
        ({**_CAUSAL, "seqlen_kv": 300}, True),
        ({"keys": "right"}, True),
        ({"keys": "right", "few_pairs": True}, True),
        ({"documents": True}, True),
    ],
)
def test_when_rows_may_have_to_be_computed_again(further: dict[str, Any], leaks: bool) -> None:
    problem = problems.build(Case(**{**_EVEN, "name": f"hopper leaks {sorted(further)}", **further}))
    with kernel_problems.planned(problem.plan):
        assert launch.may_leak(prepare(problem.text), problem.q, problem.k) is leaks


def test_calls_are_none_of_the_triton_familys() -> None:
    """Both have the same text, and would find each other's launches."""
    problem = problems.build(BY_NAME["causal"])
    inputs = (problem.q, problem.k, problem.v)
    ops = (launch.forward.op, triton_launch.forward.op)
    first, second = (replaying.call_cache(op, problem.text, inputs) for op in ops)
    assert first is not second
    assert replaying.call_cache(ops[0], problem.text, inputs) is first


# Nothing that a call launches is compiled by the call.
@pytest.mark.further
@of_a_known_compiler
def test_all_kernels_are_compiled_before_they_are_launched() -> None:
    found = {each["name"]: each for each in printed_by(compiled_ahead)}
    assert found["forward"]["begun"] == ["attention_forward_sm90", "attention_again"]
    assert found["backward"]["begun"] == [
        "attention_before_backward",
        "attention_backward_sm90",
        "attention_after_backward",
        "attention_sum_groups",
        "attention_grad_q",
        "attention_grad_kv",
    ]
    assert found["forward, bias"]["begun"] == ["attention_forward_sm90"]
    # Those that come after are the same as the other backward's, which were begun for that.
    own = ["attention_before_backward", "attention_ranks", "attention_backward_sm90"]
    assert found["in order"]["begun"] == own
    assert not [each for call in found.values() for each in call["left"]]


@pytest.mark.further
@of_a_known_compiler
def test_calls_of_50_lengths_want_two_variants_of_each_kernel() -> None:
    """One for multiples of 16, one for other lengths. Both are compiled with the graph of symbolic sizes."""
    (found,) = printed_by(any_size)
    assert list(found) == [case.name for case in any_size.CASES]
    for case in found.values():
        assert {"attention_forward_sm90", "attention_backward_sm90"} <= set(case["variants"])
        assert set(case["variants"].values()) <= {1, 2}
        assert case["late"] == []
