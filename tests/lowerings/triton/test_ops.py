"""The leaf op of the Triton kernels as PyTorch sees it: schema, fakes, autograd, symbolic sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from attn_compiler.lowerings.shared.parts import site_parts as parts
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from tests.lowerings import kernel_problems
from tests.lowerings.kernel_cases import Case
from tests.lowerings.kernel_problems import DEVICE, Problem, build, planned
from tests.passes.compiling import compiled, mark

CAUSAL = Case(name="causal", batch=1, seqlen_q=37, seqlen_kv=37, band=Band(right=0))
PADDED = Case(name="padded", seqlen_q=37, seqlen_kv=37, band=Band(right=0), keys="left", bias="hqk", sinks=True)


def problem_of(case: Case) -> Problem:
    """Without NaN in the padding: opcheck compares a tensor with itself."""
    problem = build(case)
    k, v = (x.detach().nan_to_num(0.0).requires_grad_() for x in (problem.k, problem.v))
    return dataclasses.replace(problem, k=k, v=v)


def test_schema_and_strides() -> None:
    op = torch.ops.attn_compiler.triton.default
    assert str(op._schema) == f"attn_compiler::triton{ops.LEAF_SCHEMA}"
    assert torch.Tag.needs_exact_strides in op.tags


@pytest.mark.parametrize("case", [CAUSAL, PADDED], ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    problem = problem_of(case)
    with planned(problem.plan):
        arguments = (problem.q, problem.k, problem.v, problem.operands, problem.text)
        torch.library.opcheck(torch.ops.attn_compiler.triton.default, arguments)


@pytest.mark.parametrize("case", [CAUSAL, PADDED], ids=lambda case: case.name)
def test_opcheck_of_the_backward(case: Case) -> None:
    problem = problem_of(case)
    out, lse = (x.detach() for x in kernel_problems.outputs(problem))
    given = [x.detach() for x in (problem.q, problem.k, problem.v)]
    operands = [x.detach() for x in problem.operands]
    grad_lse = torch.zeros_like(lse)
    with planned(problem.plan):
        arguments = (torch.ones_like(out), grad_lse, *given, operands, out, lse, problem.text)
        torch.library.opcheck(torch.ops.attn_compiler.triton_backward.default, arguments)


def test_operands_with_gradients_are_those_of_the_plan() -> None:
    problem = build(PADDED)
    with planned(problem.plan):
        wanted = parts.differentiable(problem.operands, problem.text)
        assert [name for name, is_wanted in zip(problem.plan.operands, wanted, strict=True) if is_wanted] == [
            "bias",
            "sinks",
        ]
        with pytest.raises(ValueError, match="keys, tiles, tiles_by_key, bias, sinks; got 4"):
            parts.differentiable(problem.operands[1:], problem.text)


# ---- symbolic sizes -----------------------------------------------------------------------------------------------


def padded(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Causal from the end, and a padding mask as tokenizers make it."""
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
    queries = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_kv - seqlen_q)
    mask = (torch.arange(seqlen_kv, device=q.device) <= queries) & padding[:, None, None, :].bool()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def causal(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def tensors(seqlen_q: int, seqlen_kv: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q)
    q, k, v = (torch.randn(2, n, 2, 16, generator=generator) for n in (seqlen_q, seqlen_kv, seqlen_kv))
    padding = torch.ones(2, seqlen_kv, dtype=torch.int64)
    padding[0, -3:] = 0
    leaves = [x.to(DEVICE).transpose(1, 2).requires_grad_() for x in (q, k, v)]
    return [*leaves, padding.to(DEVICE)]


@pytest.mark.parametrize("function", [causal, padded])
def test_one_graph_for_every_length_forward_and_backward(function: object) -> None:
    model = compiled(function, lowering="triton", verify=True)  # type: ignore[arg-type]
    for lengths in ((40, 71), (9, 21), (65, 130)):
        ours, theirs = ([mark(x, lengths) for x in tensors(*lengths)] for _ in range(2))
        found, expected = model(*ours), function(*theirs)  # type: ignore[operator]
        assert torch.allclose(found, expected, atol=1e-5)
        found.square().sum().backward()
        expected.square().sum().backward()
        for mine, right in zip(ours[:3], theirs[:3], strict=True):
            assert mine.grad is not None
            assert torch.allclose(mine.grad, right.grad, atol=1e-4)
    assert len(model.graphs) == 1
    assert "triton" in model.calls
    assert "scaled_dot_product_attention" not in model.calls
