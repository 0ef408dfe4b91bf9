"""The leaf op of attention by rows: its schema, and what PyTorch checks of it."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.rows import ops as rows_ops
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from tests.lowerings.rows.test_run import Built, built


def test_schema_and_strides() -> None:
    op = torch.ops.attn_compiler.rows.default
    assert str(op._schema) == f"attn_compiler::rows{ops.LEAF_SCHEMA}"
    assert torch.Tag.needs_exact_strides in op.tags


def test_no_operand_gets_a_gradient() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert rows_ops._differentiable([mask, mask], "text") == [False, False]


@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(causal: bool) -> None:
    given: Built = built(causal=causal)
    q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
    torch.library.opcheck(torch.ops.attn_compiler.rows.default, (q, k, v, [given.keys], given.text))


def test_opcheck_of_the_backward() -> None:
    given = built(causal=True)
    out, lse = torch.ops.attn_compiler.rows(given.q, given.k, given.v, [given.keys], given.text)
    tensors = (torch.ones_like(out), torch.zeros_like(lse), given.q, given.k, given.v)
    arguments = (*tensors, [given.keys], out, lse, given.text)
    torch.library.opcheck(torch.ops.attn_compiler.rows_backward.default, arguments)


def test_it_is_a_cpus_alone() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("attn_compiler::rows", "CPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("attn_compiler::rows", "CUDA")
