"""K and V of a cache in FP8: read above what makes them the model's numbers, where that is a cast and at most one scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler.spec.attention import StoredSpec
from tests.passes.compiling import compiled

Read = Callable[[Tensor, Tensor], Tensor]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _inputs(dtype: torch.dtype = E4M3, *, scale: Tensor | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator) for heads, length in ((4, 1), (2, 9), (2, 9)))
    return [q, k.to(dtype), v.to(dtype), torch.tensor(0.5) if scale is None else scale]


def _stored(read: Read, inputs: list[Tensor], **options: Any) -> StoredSpec | None:
    """What the site's spec says of the cache; the result is checked."""

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, read(k, scale), read(v, scale), enable_gqa=True)

    function = compiled(attention, lowering="reference", verify=True, **options)
    given = [x.clone() for x in inputs]
    torch.testing.assert_close(function(*inputs), attention(*given), atol=1e-5, rtol=1e-5)
    return function.site.spec.stored


@pytest.mark.in_turns
@pytest.mark.parametrize(
    ("read", "scaled"),
    [
        (lambda x, scale: x.float(), False),
        (lambda x, scale: x.to(torch.bfloat16).float(), False),
        (lambda x, scale: x.float() * scale, True),
        (lambda x, scale: scale * x.float(), True),
        (lambda x, scale: (x.float() * scale).to(torch.bfloat16).to(torch.float32), True),
        (lambda x, scale: (x.to(torch.float16) * scale.to(torch.float16)).float(), True),
    ],
)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_casts_and_one_scale_are_left_out(read: Read, scaled: bool, dtype: torch.dtype) -> None:
    found = _stored(read, _inputs(dtype))
    assert found is not None
    assert (found.k_scaled, found.v_scaled) == (scaled, scaled)
    assert found.k.dtype == found.v.dtype == str(dtype).removeprefix("torch.")
    assert found.k.shape == (2, 2, 9, 16)


def test_repetition_and_layout_are_read_through() -> None:
    def read(x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() * scale)[:, :, None].expand(2, 2, 2, 9, 16).reshape(2, 4, 9, 16)

    q, k, v, scale = _inputs()
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    found = _stored(read, [q, k, v, scale])
    assert found is not None
    assert (found.k.strides, found.v.strides) == (k.stride(), v.stride())


def _overwritten(x: Tensor, scale: Tensor) -> Tensor:
    read = x.float() * scale
    x.view(torch.uint8).zero_()
    return read


def _changed(x: Tensor, scale: Tensor) -> Tensor:
    read = x.float() * scale
    read[..., :3] += 1
    return read


@pytest.mark.parametrize(
    "read",
    [
        _changed,
        lambda x, scale: x.float() * scale * scale,
        lambda x, scale: x.float() * scale.expand(2, 9, 16)[:, None],
        lambda x, scale: x.float() + scale,
        lambda x, scale: x.float() / scale,
        lambda x, scale: x.float().relu(),
        lambda x, scale: x.view(torch.uint8).float() * 0.01,
        _overwritten,
    ],
)
def test_anything_else_is_not(read: Read) -> None:
    assert _stored(read, _inputs()) is None


def test_a_scale_of_each_head_is_not() -> None:
    assert _stored(lambda x, scale: x.float() * scale, _inputs(scale=torch.rand(2, 1, 1))) is None


def test_both_are_or_none_is() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k.float(), v, enable_gqa=True)

    q, k, v, _ = _inputs()
    function = compiled(attention, lowering="reference")
    function(q, k, v.float())
    assert function.site.spec.stored is None


def test_a_gradient_is_not_lost() -> None:
    q, k, v, scale = _inputs()
    assert _stored(lambda x, scale: x.float() * scale, [q, k, v, scale.requires_grad_()]) is None
