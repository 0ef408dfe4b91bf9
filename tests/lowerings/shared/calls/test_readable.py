"""Which tensors our Triton kernels read where they are, and which are copied."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.shared.calls import readable as readables
from attn_compiler.lowerings.shared.calls.readable import is_unreadable, readable
from attn_compiler.lowerings.shared.parts.kernel_plan import FARTHEST

SHAPE = (2, 3, 5, 16)


def test_what_can_be_read_is_handed_on() -> None:
    x = torch.randn(SHAPE)
    for as_it_is in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x[:, :, 1:], x[:1].expand(2, 3, 5, 16)):
        assert not is_unreadable(as_it_is)
        assert readable(as_it_is) is as_it_is


@pytest.mark.parametrize(
    "x", [torch.randn(2, 3, 16, 5).mT, torch.randn(2, 3, 5, 32)[..., ::2], torch.ones(()).expand(SHAPE)]
)
def test_a_head_whose_elements_are_apart_is_copied(x: torch.Tensor) -> None:
    """An upstream gradient of a sum is one number that is expanded."""
    assert is_unreadable(x)
    copied = readable(x)
    assert torch.equal(copied, x)
    assert copied.is_contiguous()
    assert copied.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("apart", "positions", "far"), [(FARTHEST, 2, False), (FARTHEST + 1, 2, True), (FARTHEST + 1, 1, False)]
)
def test_positions_too_far_apart_for_32_bits_are_unreadable(apart: int, positions: int, far: bool) -> None:
    x = torch.empty((), device="meta").as_strided((1, 1, positions, 16), (1, 1, apart, 1))
    assert is_unreadable(x) is far


def test_one_of_several_is_enough() -> None:
    fine, apart = torch.randn(SHAPE), torch.randn(2, 3, 16, 5).mT
    assert is_unreadable(fine, apart)
    assert not is_unreadable(fine, fine)


def test_an_odd_beginning_is_read_off_a_gpu() -> None:
    """Only there do compiled kernels read wrong elements (tests/lowerings/test_far.py and the GPU's own tests)."""
    x = torch.randn(2 * 3 * 5 * 16 + 1).half()[1:].view(SHAPE)
    assert not is_unreadable(x)


def test_what_no_copy_makes_readable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readables, "_misaligned", lambda *tensors: True)
    with pytest.raises(ValueError, match="multiples of 8 in half precision, got 12"):
        readable(torch.randn(1, 1, 4, 12).half())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "copied"), [(torch.float16, True), (torch.bfloat16, True), (torch.float32, False)])
def test_an_odd_beginning_in_half_precision_is_copied_on_a_gpu(dtype: torch.dtype, copied: bool) -> None:
    x = torch.randn(2 * 3 * 5 * 16 + 1, device="cuda").to(dtype)[1:].view(SHAPE)
    assert is_unreadable(x) is copied
    assert torch.equal(readable(x), x)
    assert not is_unreadable(readable(x))
