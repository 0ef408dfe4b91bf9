"""The backward for Hopper, run in PyTorch on the arguments of its launch (gluon_in_torch.py); the kernels around it in the interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper import backward_launch, plan
from attn_compiler.lowerings.shared.launching import launch as launching
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings import any_length, kernel_problems
from tests.lowerings.hopper import problems
from tests.lowerings.kernel_cases import Case

# A kernel that does not run is no result, though another family serves in its place.
pytestmark = pytest.mark.filterwarnings("error::attn_compiler.AttnCompilerWarning")

_CAUSAL: Any = {"band": Band(right=0)}
_SIZES: Any = {"seqlen_q": 150, "seqlen_kv": 200}
_EVEN: Any = {"seqlen_q": 200, "seqlen_kv": 200}

CASES = (
    Case(name="hopper plain", **_SIZES),
    Case(name="hopper causal", **_EVEN, **_CAUSAL),
    Case(name="hopper causal, more keys", **_SIZES, **_CAUSAL),
    Case(name="hopper causal, more queries", seqlen_q=300, seqlen_kv=130, **_CAUSAL),
    Case(name="hopper from the end", band=Band(right=0, from_end=True), **_SIZES),
    Case(name="hopper strict", band=Band(right=-1), **_EVEN),
    Case(name="hopper window", band=Band(left=40, right=7), **_SIZES),
    Case(name="hopper padding left", keys="left", **_EVEN, **_CAUSAL),
    Case(name="hopper padding right", keys="right", **_SIZES),
    Case(name="hopper a row without keys", keys="none", **_SIZES),
    Case(name="hopper holes", keys="holes", **_EVEN, **_CAUSAL),
    Case(name="hopper few pairs", keys="left", few_pairs=True, seqlen_q=70, seqlen_kv=130),
    Case(name="hopper intervals", rows=True, **_SIZES),
    Case(name="hopper documents", documents=True, **_EVEN, **_CAUSAL),
    Case(name="hopper all of a mask", documents=True, rows=True, keys="holes", band=Band(left=100, right=3), **_SIZES),
    Case(name="hopper slopes", slopes=True, **_EVEN, **_CAUSAL),
    Case(name="hopper softcap, sinks", softcap=5.0, sinks=True, **_EVEN, **_CAUSAL),
    Case(name="hopper sinks without keys", sinks=True, keys="none", **_SIZES),
    Case(name="hopper slopes, softcap", slopes=True, softcap=5.0, **_EVEN, **_CAUSAL),
    Case(name="hopper 96", head_dim=96, **_EVEN, **_CAUSAL),
    Case(name="hopper 80, window", head_dim=80, band=Band(left=40, right=7), **_SIZES),
    Case(name="hopper 88 and 80, documents", head_dim=88, head_dim_v=80, documents=True, **_EVEN, **_CAUSAL),
    Case(name="hopper 64 and 96", head_dim=64, head_dim_v=96, **_SIZES),
    Case(name="hopper 128 and 72", head_dim=128, head_dim_v=72, keys="left", **_SIZES, **_CAUSAL),
    Case(name="hopper one query", seqlen_q=1, seqlen_kv=130),
    Case(name="hopper one key", seqlen_q=130, seqlen_kv=1),
    Case(name="hopper groups of four", heads_q=4, heads_kv=1, batch=1, layout="bhsd", **_EVEN, **_CAUSAL),
    Case(name="hopper split projection", layout="sb(h+2hg)d", heads_q=4, heads_kv=2, **_EVEN),
    Case(name="hopper bias", bias="bhqk", bias_grad=False, heads_q=4, heads_kv=2, seqlen_q=150, seqlen_kv=208),
    Case(name="hopper bias of all heads, 128", bias="bqk", bias_grad=False, head_dim=128, **_EVEN, **_CAUSAL),
    Case(name="hopper bias, padding left", bias="hqk", bias_grad=False, keys="left", **_EVEN, **_CAUSAL),
    Case(name="hopper bias, mask, softcap", bias="qk", bias_grad=False, mask="qk", softcap=5.0, **_EVEN),
    Case(name="hopper mask", mask="bhqk", heads_q=4, heads_kv=2, **_SIZES),
    Case(name="hopper mask of all batch rows, 128", mask="hqk", head_dim=128, **_EVEN, **_CAUSAL),
    Case(name="hopper mask of queries", mask="bq", **_SIZES),
    Case(name="hopper mask of keys", mask="hk", **_SIZES),
    Case(name="hopper mask, padding left, documents", mask="qk", keys="left", documents=True, **_EVEN, **_CAUSAL),
)

_WIDE: Any = {"head_dim": 512, "heads_q": 2}
#: head dims above 256
WIDE = (
    Case(name="hopper wide plain", **_WIDE, **_SIZES),
    Case(name="hopper wide causal", **_WIDE, **_EVEN, **_CAUSAL),
    Case(name="hopper wide causal, more queries", seqlen_q=300, seqlen_kv=130, **_WIDE, **_CAUSAL),
    Case(name="hopper wide from the end", band=Band(right=0, from_end=True), **_WIDE, **_SIZES),
    Case(name="hopper wide window", band=Band(left=40, right=7), **_WIDE, **_SIZES),
    Case(name="hopper wide padding left", keys="left", **_WIDE, **_EVEN, **_CAUSAL),
    Case(name="hopper wide a row without keys, sinks", keys="none", sinks=True, **_WIDE, **_SIZES),
    Case(name="hopper wide few pairs", keys="left", few_pairs=True, seqlen_q=70, seqlen_kv=130, **_WIDE),
    Case(
        name="hopper wide all of a mask",
        documents=True,
        rows=True,
        keys="holes",
        band=Band(left=100, right=3),
        **_WIDE,
        **_SIZES,
    ),
    Case(name="hopper wide slopes, softcap", slopes=True, softcap=5.0, **_WIDE, **_EVEN, **_CAUSAL),
    Case(name="hopper wide documents, sinks", documents=True, sinks=True, **_WIDE, **_EVEN, **_CAUSAL),
    Case(name="hopper wide one query", seqlen_q=1, seqlen_kv=130, **_WIDE),
    Case(name="hopper wide three keys", seqlen_q=130, seqlen_kv=3, **_WIDE),
    Case(
        name="hopper wide groups of four",
        head_dim=512,
        heads_q=4,
        heads_kv=1,
        batch=1,
        layout="bhsd",
        **_EVEN,
        **_CAUSAL,
    ),
    Case(name="hopper wide 384 and 320", head_dim=384, head_dim_v=320, keys="left", **_SIZES, **_CAUSAL),
    Case(name="hopper wide 320 and 128", head_dim=320, head_dim_v=128, **_EVEN, **_CAUSAL),
    Case(name="hopper wide 200 and 512", head_dim=200, head_dim_v=512, **_EVEN, **_CAUSAL),
)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name.removeprefix("hopper wide "))
def test_gradients_of_wide_heads(case: Case) -> None:
    problem = problems.build(case)
    kernel_problems.assert_within_rule(problems.results(problem), problem)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("hopper "))
def test_gradients_by_their_definition(case: Case) -> None:
    problem = problems.build(case)
    kernel_problems.assert_within_rule(problems.results(problem), problem)


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("hopper "))
def test_gradients_that_are_added_up_in_one_order(case: Case) -> None:
    """Programs run at once, and wait for each other."""
    problem = problems.build(dataclasses.replace(case, name=f"{case.name}, in order"))
    kernel_problems.assert_within_rule(problems.results(problem, in_order=True), problem)


@pytest.mark.in_turns
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_any_number_of_programs_shares_the_blocks(programs: int, in_order: bool) -> None:
    problem = problems.build(Case(name=f"hopper programs {programs}", keys="left", **_EVEN, **_CAUSAL))
    kernel_problems.assert_within_rule(problems.results(problem, programs=programs, in_order=in_order), problem)


@pytest.mark.in_turns
@pytest.mark.parametrize("section", [1, 3, 100])
@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[13]], ids=lambda case: case.name)
def test_in_one_order_however_many_heads_take_turns(section: int, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_launch, "_section", lambda *_: section)
    sizes: Any = {"heads_q": 4, "heads_kv": 2, "seqlen_q": 300, "seqlen_kv": 300}
    problem = problems.build(dataclasses.replace(case, name=f"{case.name}, sections of {section}", **sizes))
    kernel_problems.assert_within_rule(problems.results(problem, programs=4, in_order=True), problem)


def test_sums_of_dq_are_the_same_to_the_last_bit_in_every_run() -> None:
    """As many programs as there are blocks, so that who comes first is a race."""
    problem = problems.build(Case(name="hopper one order", seqlen_q=200, seqlen_kv=700, heads_q=1))
    first = problems.results(problem, programs=12, in_order=True)
    for programs in (12, 1):
        again = problems.results(problem, programs=programs, in_order=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.in_turns
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("queries", "stages"), [(64, 2), (128, 2), (64, 4)])
def test_any_blocks(queries: int, stages: int, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 128 queries each warpgroup takes half of these of dq, else half of its columns."""
    monkeypatch.setitem(plan.GRAD_BLOCKS, 64, plan.GradBlocks(queries=queries, stages=stages))
    problem = problems.build(Case(name=f"hopper blocks {queries} {stages}", keys="left", **_EVEN, **_CAUSAL))
    kernel_problems.assert_within_rule(problems.results(problem, in_order=in_order), problem)


@pytest.mark.parametrize("head_dim", [16, 264])
def test_keys_that_nobody_uses_may_hold_nan(head_dim: int) -> None:
    """The problem has NaN there. The kernels raise their flag, and the Triton family computes all gradients again."""
    problem = problems.build(Case(name=f"marked {head_dim}", keys="left", head_dim=head_dim, **_EVEN, **_CAUSAL))
    assert problem.k.isnan().any()
    got = problems.results(problem)
    kernel_problems.assert_within_rule(got, problem)
    assert not any(x.isnan().any() for x in got)


def test_gradients_that_are_right_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NaN would come out of kernels that are given it."""
    seen: list[int] = []
    real = launching.launch

    def watching(kernel: Any, same: Any, tensors: Any, arguments: Any, part: str = "") -> Any:
        if kernel.fn.__name__ == "attention_grad_q":
            seen.append(int(tensors["Flag"][0]))
        return real(kernel, same, tensors, arguments, part)

    monkeypatch.setattr(launching, "launch", watching)
    problem = problems.build(Case(name="hopper unmarked", rows=True, **_SIZES))
    problems.results(problem)
    assert seen == [0]


def test_queries_without_keys_may_hold_anything() -> None:
    problem = problems.build(Case(name="hopper nothing to use", keys="none", **_SIZES))
    without = ~problem.named["keys"].any(1)
    assert without.any()
    with torch.no_grad():
        problem.q[without] = torch.nan
    got = problems.results(problem)
    assert not any(x.isnan().any() for x in got)


def test_without_lists_and_holes_no_kernel_is_started_for_nan() -> None:
    problem = problems.build(Case(name="hopper diagonal", **_EVEN, **_CAUSAL))
    started: list[str] = []

    def record(kernel: Any, same: Any, tensors: Any, arguments: Any, part: str = "") -> None:
        started.append(kernel.fn.__name__)

    out, lse = problems.outputs(problem)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), kernel_problems.planned(problem.plan):
        patch.setattr(backward_launch, "launch", record)
        read = (problem.q, problem.k, problem.v, problems.grad_operands(problem))
        backward_launch.gradients(out, lse, *read, out, lse, problem.text)
    around = ["attention_before_backward", "attention_backward_sm90", "attention_after_backward"]
    assert started == around + ["attention_sum_groups"] * 2 * (problem.q.shape[1] > problem.k.shape[1])


def test_without_queries_the_first_kernel_sets_the_counter_too() -> None:
    """Sizes that are not known may be 0."""
    problem = problems.build(Case(name="hopper no queries", **_EVEN, **_CAUSAL))
    q = problem.q[:, :, :0]
    started: dict[str, tuple[int, ...]] = {}

    def record(kernel: Any, same: Any, tensors: Any, arguments: Any, part: str = "") -> None:
        started[kernel.fn.__name__] = arguments().grid

    with problems.starting(problem, record, programs=3):
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
        backward_launch.gradients(out, lse, q, problem.k, problem.v, [], out, lse, problem.text)
    assert 0 not in started["attention_before_backward"]


def test_blocks_are_those_of_the_head_dim() -> None:
    problem = problems.build(Case(name="hopper blocks of 128", head_dim=128, **_EVEN))
    found = plan.grad_blocks_of(kernel_problems.Call.from_text(problem.text).spec, problem.plan)
    assert found == plan.GRAD_BLOCKS[128]
    assert dataclasses.replace(found, queries=128).sum_columns(128) == 128
    assert found.sum_columns(128) == 64


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    "case",
    [
        Case(name="padding left", keys="left", **_CAUSAL),
        Case(name="window", band=Band(left=40, right=0), heads_q=4, heads_kv=2),
        Case(name="padded window, sinks", keys="left", band=Band(left=40, right=0), sinks=True),
        Case(name="softcap, 128", softcap=5.0, head_dim=128, **_CAUSAL),
        Case(name="wide", head_dim=264, **_CAUSAL),
        Case(name="wide, padding left", keys="left", head_dim=264, **_CAUSAL),
    ],
    ids=lambda case: case.name,
)
def test_one_text_serves_every_batch_and_length(case: Case) -> None:
    """Grids, tiles' lists and strides are those of a call: nothing of a length is in what a graph says."""

    def built(length: int) -> kernel_problems.Problem:
        sizes: Any = {"seqlen_q": length, "seqlen_kv": length, "batch": 1 + length % 2}
        return problems.build(dataclasses.replace(case, name=f"hopper any length, {case.name}", **sizes))

    for problem in any_length.at_each(built):
        kernel_problems.assert_within_rule(problems.results(problem), problem)
