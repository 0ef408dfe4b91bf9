from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.cudnn import fp8_gradients
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from tests.lowerings.cudnn.test_fp8 import _forward, on_the_cpu  # noqa: F401

CALL = CudnnCall(scale=128**-0.5, right=0, needs_grad=True, fp8="backward")


def given(*, seqlen: int = 256, upstream: torch.Tensor | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradient of the output, and the operands that the formula gets."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, seqlen, heads, 128).transpose(1, 2) for heads in (4, 2, 2))
    descales = {name: (x.abs().amax() / 448).reshape(1) for name, x in (("q", q), ("k", k), ("v", v))}
    q, k, v = (x / descales[name] for name, x in (("q", q), ("k", k), ("v", v)))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    scale_out = 0.5 / descales["v"]
    one = torch.ones(1)
    scales = [*descales.values(), one / 448, one * 448]
    forward = CudnnCall(scale=CALL.scale, right=0, needs_grad=True, fp8="forward")
    out, lse = _forward(q, k, v, [*scales, scale_out], forward.to_text())
    upstream = torch.randn(1, 4, seqlen, 128) if upstream is None else upstream
    return upstream.bfloat16(), [q, k, v, out, lse, *scales, 1 / scale_out]


def gradients(upstream: torch.Tensor, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.float() for x in fp8_gradients.gradients(upstream, operands, CALL.to_text())]


@pytest.mark.usefixtures("on_the_cpu")
def test_scales_follow_the_gradient_that_comes_in() -> None:
    """A gradient of the output that is so many times as large: gradients are, too, to the last bit."""
    upstream, operands = given()
    plain, large = gradients(upstream, operands), gradients(upstream * 2.0**40, operands)
    for small, big in zip(plain, large, strict=True):
        torch.testing.assert_close(big, small * 2.0**40, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("value", [0.0, 1e-44])
def test_a_gradient_of_nothing_is_nothing(value: float) -> None:
    shape = (1, 4, 64, 128)
    upstream, operands = given(seqlen=64, upstream=torch.full(shape, value))
    assert all(x.abs().max() < 1e-30 for x in gradients(upstream, operands))


@pytest.mark.usefixtures("on_the_cpu")
def test_one_row_that_is_far_larger_than_the_others_leaves_those_their_gradients() -> None:
    """As in training, where few tokens have most of the gradient."""
    upstream, operands = given()
    heavy = upstream.clone()
    heavy[:, :, -1] *= 2.0**10
    light = upstream.clone()
    light[:, :, -1] = 0
    found, alone = gradients(heavy, operands)[0], gradients(light, operands)[0]
    assert (found - alone)[:, :, :-1].norm() / alone.norm() < 0.15


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_leaves_all_others_their_gradients(value: float) -> None:
    """Small ones, which a scale of 1 would lose."""
    upstream, operands = given(upstream=1e-6 * torch.randn(1, 4, 256, 128, generator=torch.Generator().manual_seed(1)))
    without, heavy = upstream.clone(), upstream.clone()
    without[:, 0, -1], heavy[:, 0, -1] = 0.0, value
    right, found = gradients(without, operands), gradients(heavy, operands)
    assert torch.equal(found[0][:, :, :-1], right[0][:, :, :-1])
    assert found[0][:, 0, -1].isnan().any()
    for got, wanted in zip(found[1:], right[1:], strict=True):
        assert wanted[:, 1].any()
        assert torch.equal(got[:, 1], wanted[:, 1])


def test_the_names_are_what_the_forward_left() -> None:
    padded = CudnnCall(scale=1.0, needs_grad=True, fp8="backward", lengths=True)
    assert fp8_gradients.names(CALL, may_be_empty=False)[:5] == ("q", "k", "v", "out", "lse")
    assert fp8_gradients.names(padded, may_be_empty=True)[-3:] == ("lengths_q", "lengths", "used")
    assert fp8_gradients.names(padded, may_be_empty=False)[-2:] == ("lengths_q", "lengths")
