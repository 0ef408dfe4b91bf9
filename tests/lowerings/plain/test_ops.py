"""The leaf op of the reference as PyTorch sees it: schema, fakes, autograd, and what of its operands gets a gradient."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.plain import ops as plain_ops, reference
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from tests import cases
from tests.cases import BY_NAME, Inputs

NAMES = ["causal", "gqa", "bias_heads", "sinks", "causal_bfloat16"]


def built(name: str) -> tuple[Inputs, list[torch.Tensor]]:
    """A case, and the operands of its op."""
    inputs = cases.build(BY_NAME[name])
    return inputs, [x for x in (inputs.mask, inputs.bias, inputs.sinks) if x is not None]


def detached(inputs: Inputs) -> list[torch.Tensor]:
    return [x.detach() for x in (inputs.q, inputs.k, inputs.v)]


def test_schema_and_strides() -> None:
    op = torch.ops.attn_compiler.reference.default
    assert str(op._schema) == f"attn_compiler::reference{ops.LEAF_SCHEMA}"
    assert torch.Tag.needs_exact_strides in op.tags


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    inputs, operands = built(name)
    arguments = (inputs.q, inputs.k, inputs.v, operands, inputs.spec.to_text())
    torch.library.opcheck(torch.ops.attn_compiler.reference.default, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_the_backward(name: str) -> None:
    inputs, operands = built(name)
    given, operands, text = detached(inputs), [x.detach() for x in operands], inputs.spec.to_text()
    out, lse = torch.ops.attn_compiler.reference(*given, operands, text)
    arguments = (torch.ones_like(out), torch.zeros_like(lse), *given, operands, out, lse, text)
    torch.library.opcheck(torch.ops.attn_compiler.reference_backward.default, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_is_the_reference_s_in_the_model_s_dtype(name: str) -> None:
    inputs, operands = built(name)
    given, operands = detached(inputs), [x.detach() for x in operands]
    out, lse = torch.ops.attn_compiler.reference(*given, operands, inputs.spec.to_text())
    exact_out, exact_lse = reference.forward(*given, operands, inputs.spec)
    assert out.dtype == inputs.q.dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, exact_out.to(out.dtype))
    assert torch.equal(lse, exact_lse.to(lse.dtype))


@pytest.mark.parametrize("name", ["bias_heads", "sinks"])
def test_gradients_of_operands_come_in_their_dtype_and_order(name: str) -> None:
    inputs, operands = built(name)
    out, lse = torch.ops.attn_compiler.reference(inputs.q, inputs.k, inputs.v, operands, inputs.spec.to_text())
    wanted = (inputs.q, inputs.k, inputs.v, *operands)
    got = torch.autograd.grad((out, lse), wanted, (torch.ones_like(out), torch.ones_like(lse)))
    given = (*detached(inputs), [x.detach() for x in operands])
    *exact, exact_operands = reference.backward(torch.ones_like(out), torch.ones_like(lse), *given, inputs.spec)
    for gradient, tensor, right in zip(got, wanted, (*exact, *exact_operands), strict=True):
        assert (gradient.dtype, gradient.shape) == (tensor.dtype, tensor.shape)
        torch.testing.assert_close(gradient, right.to(tensor.dtype))


def test_operands_are_those_of_the_spec() -> None:
    inputs, operands = built("bias_heads")
    text = inputs.spec.to_text()
    assert plain_ops._reference_differentiable(operands, text) == [True]
    with pytest.raises(ValueError, match="the spec has 1 operands"):
        plain_ops._reference_differentiable([*operands, operands[0]], text)
