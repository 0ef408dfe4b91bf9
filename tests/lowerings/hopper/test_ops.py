"""The ops that hand on what Hopper's leaf op computed, with another family's backward. The Triton family's runs in its interpreter."""

from __future__ import annotations

import torch

from attn_compiler.lowerings.hopper.ops import given_op
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import BY_NAME


def test_each_family_has_an_op() -> None:
    for family in ("triton", "sdpa_cudnn"):
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
