"""What biases and masks on Hopper are measured on: their tensors, and float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attn_compiler.lowerings.choice import hopper_added
from attn_compiler.lowerings.shared import parts
from benchmarks import added_cases
from benchmarks.added_cases import CASES, AddedCase

SORTS = {case.name.rpartition("_s")[0]: case for case in CASES if case.head_dim == 64}


def _small(case: AddedCase) -> AddedCase:
    return dataclasses.replace(case, batch=2, heads_q=2, heads_kv=2, seqlen=320)


def _right(problem: added_cases.Problem, case: AddedCase) -> Tensor:
    """By PyTorch's own attention."""
    size, bias = case.seqlen, torch.zeros(())
    at = torch.arange(size)
    if case.bias:
        bias = problem.given["bias"].double()
    if case.table:
        bias = problem.given["table"].double()[at - at[:, None] + size - 1].permute(2, 0, 1)[None]
    allowed = problem.given.get("mask", torch.ones(1, 1, size, size, dtype=torch.bool))
    allowed = allowed & (at <= at[:, None]) if case.causal else allowed
    mask = bias.double().expand(1, case.heads_q, size, size).masked_fill(~allowed, -torch.inf)
    given = (x.double() for x in (problem.q, problem.k, problem.v))
    return functional.scaled_dot_product_attention(*given, attn_mask=mask)


@pytest.mark.parametrize("sort", SORTS)
def test_float64_is_what_pytorch_computes(sort: str) -> None:
    case = _small(SORTS[sort])
    problem = added_cases.build(case, "cpu")
    right = _right(problem, case)
    exact = added_cases.exact(problem)
    for batch, head, out, _ in exact:
        torch.testing.assert_close(out, right[batch, head])
    lse = torch.zeros(case.batch, case.heads_q, case.seqlen, dtype=torch.float64)
    for batch, head, _, of_head in exact:
        lse[batch, head] = of_head
    assert added_cases.error([right, lse], exact) < 1e-12
    assert added_cases.error([right * 1.1], exact) == pytest.approx(0.1)
    assert added_cases.error([right * torch.nan], exact) == float("inf")


@pytest.mark.parametrize("sort", SORTS)
def test_each_case_has_its_part(sort: str) -> None:
    case = _small(SORTS[sort])
    problem = added_cases.build(case, "cpu")
    assert case.part in parts.parts(problem.spec).kinds & hopper_added.PARTS
    assert added_cases.build(case, "cpu", training=True).spec.needs_grad
    bias = problem.given.get("bias")
    assert bias is None or bias.element_size() == case.element


def test_gradients_of_float64() -> None:
    case = _small(SORTS["mask_holes_d64"])
    problem = added_cases.build(case, "cpu", training=True)
    grad_out = torch.randn_like(problem.q)
    leaves = [x.detach().double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    given: Any = dataclasses.replace(problem, q=leaves[0], k=leaves[1], v=leaves[2])
    wanted = torch.autograd.grad(_right(given, case), leaves, grad_out.double())
    for batch, head, *found in added_cases.exact_gradients(problem, grad_out):
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs[batch, head])


def test_pairs_of_a_dense_mask_are_those_that_it_allows() -> None:
    for dense in ("holes", "blocks"):
        case = dataclasses.replace(_small(SORTS["mask_holes_d64"]), dense=dense)
        mask = added_cases.mask_of(case)
        assert case.pairs == 2 * int(mask.sum()) < 2 * mask.numel()
        assert mask.diagonal().all()


def test_names_are_of_one_case_each() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {added_cases.head_dims(case) for case in CASES} == {(1, 64), (65, 128), (129, 256)}
