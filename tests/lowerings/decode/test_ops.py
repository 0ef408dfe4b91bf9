"""The decode leaf op as PyTorch sees it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from tests.lowerings.decode.problems import BY_NAME, Problem, build, planned


def problem_of(name: str) -> Problem:
    """Without NaN: opcheck compares a tensor with itself."""
    problem = build(BY_NAME[name])
    return dataclasses.replace(problem, k=problem.k.nan_to_num(0.0), v=problem.v.nan_to_num(0.0))


def test_schema_and_strides() -> None:
    op = torch.ops.attn_compiler.decode.default
    assert str(op._schema) == f"attn_compiler::decode{ops.LEAF_SCHEMA}"
    assert torch.Tag.needs_exact_strides in op.tags


@pytest.mark.parametrize("name", ["lengths", "keys_left", "everything", "splits_unknown"])
def test_opcheck(name: str) -> None:
    """Among the checks: no operand is changed, the counters included."""
    problem = problem_of(name)
    with planned(problem.plan):
        arguments = (problem.q, problem.k, problem.v, problem.operands, problem.text)
        torch.library.opcheck(torch.ops.attn_compiler.decode.default, arguments)


def test_counters_are_zeros_where_the_queries_are() -> None:
    q = torch.empty(2, 4, 1, 16)
    arguments = (q, 6)
    assert torch.equal(torch.ops.attn_compiler.decode_count(*arguments), torch.zeros(6, dtype=torch.int32))
    torch.library.opcheck(torch.ops.attn_compiler.decode_count.default, arguments)
