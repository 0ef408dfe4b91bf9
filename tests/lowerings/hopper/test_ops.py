"""The ops that hand on what Hopper's leaf op computed, with each family's backward. The Triton family's runs in its interpreter, this
family's in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.hopper.ops import given_op
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import BY_NAME, Case


def test_each_family_has_an_op() -> None:
    for family in ("hopper", "hopper_in_order", "triton", "sdpa_cudnn"):
        assert hasattr(torch.ops.attn_compiler, given_op(family))


def test_gradients_are_the_triton_familys() -> None:
    problem = kernel_problems.build(BY_NAME["causal"])
    leaves = [problem.q, problem.k, problem.v]
    with kernel_problems.planned(problem.plan):
        out, lse = kernel_problems.outputs(problem)
        upstream = torch.randn_like(out)
        wanted = torch.autograd.grad(out, leaves, upstream)
        kept = [x.detach() for x in (out, lse, *leaves)]
        operands = [*kept, *problem.operands]
        handed = torch.ops.attn_compiler.hopper_triton_given(*leaves, operands, problem.text)[0]
        found = torch.autograd.grad(handed, leaves, upstream)
    torch.testing.assert_close(handed, out)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("part", ["triton_part", "hopper_triton_part_given"])
def test_a_part_gets_minus_delta_in_place_of_its_own_output(part: str) -> None:
    problem = kernel_problems.build(BY_NAME["causal"])
    leaves = [problem.q, problem.k, problem.v]
    ours = torch.ops.attn_compiler
    with kernel_problems.planned(problem.plan):
        out, lse = kernel_problems.outputs(problem)
        upstream, of_lse = torch.randn_like(out), torch.randn_like(lse)
        wanted = torch.autograd.grad((out, lse), leaves, (upstream, of_lse))
        minus_delta = of_lse - (out.detach() * upstream).sum(-1)
        if part == "triton_part":
            handed = ours.triton_part(*leaves, problem.operands, problem.text)
        else:
            kept = [x.detach() for x in (out, lse, *leaves)]
            handed = getattr(ours, part)(*leaves, [*kept, *problem.operands], problem.text)
        found = torch.autograd.grad(handed, leaves, (upstream, minus_delta))
    torch.testing.assert_close(handed[0], out)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


_SIZES: Any = {"heads_q": 4, "heads_kv": 2, "band": Band(right=0)}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    "case",
    [
        Case(name="hopper given, odd lengths", seqlen_q=333, seqlen_kv=301, **_SIZES),
        Case(name="hopper given, window", seqlen_q=260, seqlen_kv=260, **_SIZES | {"band": Band(left=77, right=0)}),
        Case(name="hopper given, padding", seqlen_q=390, seqlen_kv=390, keys="left", **_SIZES),
        Case(name="hopper given, documents", seqlen_q=270, seqlen_kv=270, documents=True, **_SIZES),
    ],
    ids=lambda case: case.name.removeprefix("hopper given, "),
)
def test_gradients_in_one_order_come_through_the_op_that_autograd_calls(case: Case) -> None:
    """As many programs as run at once, under the switch itself: memory that nobody wrote to then holds the largest number, which no counter
    reaches."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from attn_compiler.lowerings.hopper import backward_launch
    from tests.lowerings.hopper import problems

    problem = problems.build(case)
    out, lse = problems.outputs(problem)

    def on_a_cpu(*given: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        with problems.emulated(problem, programs=5, together=True):
            return backward_launch.gradients_in_order(*given)

    leaves = [problem.q, problem.k, problem.v]
    operands = [x.detach() for x in (out, lse, *leaves, *problems.grad_operands(problem))]
    torch.use_deterministic_algorithms(True)
    try:
        with torch.library._scoped_library("attn_compiler", "FRAGMENT") as library:
            library.impl("hopper_in_order_backward", on_a_cpu, "CPU")
            with kernel_problems.planned(problem.plan):
                handed = torch.ops.attn_compiler.hopper_hopper_in_order_given(*leaves, operands, problem.text)
                upstream = kernel_problems.upstream(problem, out, lse)
                runs = [torch.autograd.grad(handed, leaves, upstream, retain_graph=True) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    kernel_problems.assert_within_rule([*handed, *runs[0]], problem)


@pytest.mark.parametrize("keys", [None, "left"])
def test_gradients_of_wide_heads_come_through_the_op_that_autograd_calls(keys: str | None) -> None:
    """With padding dq reads lists of keys, and dk and dv lists of queries."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from attn_compiler.lowerings.hopper import backward_launch
    from tests.lowerings.hopper import problems

    sizes: Any = {**_SIZES, "head_dim": 320, "seqlen_q": 150, "seqlen_kv": 150}
    problem = problems.build(Case(name=f"hopper given, wide {keys}", keys=keys, **sizes))
    out, lse = problems.outputs(problem)

    def on_a_cpu(*given: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        with problems.emulated(problem, programs=3, together=False):
            return backward_launch.gradients(*given)

    leaves = [problem.q, problem.k, problem.v]
    operands = [x.detach() for x in (out, lse, *leaves, *problems.grad_operands(problem))]
    with torch.library._scoped_library("attn_compiler", "FRAGMENT") as library:
        library.impl("hopper_backward", on_a_cpu, "CPU")
        with kernel_problems.planned(problem.plan):
            handed = torch.ops.attn_compiler.hopper_hopper_given(*leaves, operands, problem.text)
            upstream = kernel_problems.upstream(problem, out, lse)
            found = torch.autograd.grad(handed, leaves, upstream)
    kernel_problems.assert_within_rule([*handed, *found], problem)
