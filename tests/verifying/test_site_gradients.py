"""A wrong backward of a kernel, and what a model may do to operands and gradients of a site."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from attn_compiler.reasons.errors import VerificationMismatch
from tests.passes.compiling import compiled
from tests.verifying.planning import Layers
from tests.verifying.training import (
    DTYPES,
    LENGTH,
    Tensor,
    assert_all_verified,
    assert_verified,
    causal,
    checkpointed,
    found,
    loss,
    qkv,
    softmaxed,
    trained,
)

pytestmark = pytest.mark.usefixtures("nothing_kept")


def test_some_inputs_are_frozen() -> None:
    q, k, v = qkv()
    trained(causal, q, k.detach(), v.detach())
    assert_all_verified()


def test_the_same_tensor_as_query_key_and_value() -> None:
    trained(lambda x: causal(x, x, x), qkv()[0])
    assert_all_verified()


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_gradients_of_some_inputs_alone(inner: str) -> None:
    """Without a compiler the nodes make no gradient that nobody asks for."""
    inputs = qkv()
    out = compiled(causal, verify=True, inner=inner)(*inputs)
    torch.autograd.grad(loss(out), inputs[1:2])
    assert_all_verified()


@pytest.mark.in_turns
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("function", [causal, softmaxed, checkpointed, Layers()], ids=lambda f: type(f).__name__)
def test_a_backward_that_is_off_by_a_factor(
    function: Callable[..., Tensor], dtype: torch.dtype, wrong_backward: str
) -> None:
    with pytest.raises(VerificationMismatch) as caught:
        trained(function, *qkv(dtype=dtype))
    assert caught.value.what in ("gradient of q", "gradient of k", "gradient of v")
    if not isinstance(function, Layers):
        assert caught.value.what == f"gradient of {wrong_backward}"
    assert found("graph gradients") == []
    assert_verified("graph outputs")


def test_a_mask_that_is_partly_written_after_it_was_made() -> None:
    """The mask is what it holds at the site, whatever of its making the kernel reads in place of it."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = ((torch.arange(LENGTH, device=q.device)[None, :] >> 1) > 0).long()
        mask.select(1, 0).fill_(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool())

    trained(function, *qkv(), lowerings=["triton", "math"])
    assert_verified("output", "graph gradients")


def test_random_numbers_set_the_whole_graph_apart() -> None:
    trained(lambda q, k, v: causal(F.dropout(q, 0.5), k, v), *qkv())
    assert_verified("output")
    for subject in ("graph outputs", "graph gradients"):
        (check,) = found(subject)
        assert check.skipped == "the graph draws random numbers, others in every compiler"


def test_dropout_in_a_site_is_said() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    trained(function, *qkv(), lowerings=["reference"])
    assert all(v.skipped is not None for v in (*found("output"), *found("graph gradients")))


def test_operand_written_by_the_caller_through_data() -> None:
    """Eager's backward reads the written values, which no gradient is made of; a kernel that saved a copy is not wrong."""
    q, k, v = (x.transpose(0, 1).contiguous().detach().requires_grad_() for x in qkv())

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return torch.einsum("bhqk,bhkd->bhqd", (q @ k.mT).softmax(-1), v)

    out = compiled(function, verify=True, inner="aot_eager")(q, k, v)
    v.data.mul_(2)
    loss(out).backward()
    (check,) = found("graph gradients")
    assert check.skipped is None or ".data" in check.skipped


def test_operand_written_in_the_graph_through_data() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k * 1
        out = causal(q, k, v)
        k.data.zero_()
        return out

    trained(function, *qkv(), lowerings=["reference"])
    (check,) = found("graph gradients")
    assert check.skipped is None or ".data" in check.skipped
