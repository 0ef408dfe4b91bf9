"""The leaf op of FlashAttention-4 as PyTorch sees it, with a stand-in for the kernels."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.fa4 import ops as fa4_ops
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from tests.lowerings.fa4.cases import PROBLEMS, inputs
from tests.lowerings.fa4.stand_in import StandIn, flash  # noqa: F401 - a fixture

BY_NAME = {problem.name: problem for problem in PROBLEMS}
NAMES = ["causal_bfloat16", "window_gqa_sinks"]


def test_schema_and_strides() -> None:
    op = torch.ops.attn_compiler.fa4.default
    assert str(op._schema) == f"attn_compiler::fa4{ops.LEAF_SCHEMA}"
    assert torch.Tag.needs_exact_strides in op.tags


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME[name], device="cpu")
    arguments = (built.q, built.k, built.v, built.operands, built.text())
    torch.library.opcheck(torch.ops.attn_compiler.fa4.default, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_the_backward(name: str, flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME[name], device="cpu")
    given = [x.detach() for x in (built.q, built.k, built.v)]
    operands = [x.detach() for x in built.operands]
    out, lse = torch.ops.attn_compiler.fa4.default(*given, operands, built.text())
    arguments = (torch.ones_like(out), torch.zeros_like(lse), *given, operands, out, lse, built.text())
    torch.library.opcheck(torch.ops.attn_compiler.fa4_backward.default, arguments)


def test_operands_are_those_of_the_spec() -> None:
    plain, sinks = (inputs(BY_NAME[name], device="cpu") for name in NAMES)
    assert fa4_ops.differentiable([], plain.text()) == []
    assert fa4_ops.differentiable(sinks.operands, sinks.text()) == [True]
    with pytest.raises(ValueError, match="the spec has no operands; got 1"):
        fa4_ops.differentiable(sinks.operands, plain.text())
    with pytest.raises(ValueError, match="the spec has sinks; got 0"):
        fa4_ops.differentiable([], sinks.text())
