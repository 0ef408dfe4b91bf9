"""A dense mask as bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_compiler.lowerings.hopper import mask_bits
from attn_compiler.lowerings.shared.parts.kernel_plan import Plan
from tests.lowerings import kernel_problems


@pytest.mark.parametrize("shape", [(2, 3, 5, 70), (1, 1, 4, 512), (1, 2, 1, 513), (2, 1, 7, 1)])
def test_each_pair_has_its_bit(shape: tuple[int, ...]) -> None:
    emitter: Any = kernel_problems.Eager()
    mask = torch.rand(shape) < 0.5
    seqlen = 100 if shape[3] == 1 else shape[3]
    words = mask_bits.emit(emitter, mask, seqlen)
    assert words.dtype == torch.int32
    assert words.shape[:3] == shape[:3]
    assert words.shape[3] % 16 == 0
    assert words.is_contiguous()
    found = (words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    assert torch.equal(found.flatten(3)[..., :seqlen] != 0, mask.expand(*shape[:3], seqlen))
    assert not found.flatten(3)[..., seqlen:].any()


def test_bits_of_queries_by_key() -> None:
    emitter: Any = kernel_problems.Eager()
    mask = torch.rand(2, 1, 70, 130) < 0.5
    words = mask_bits.emit_by_key(emitter, mask, 70)
    assert torch.equal(words, mask_bits.emit(emitter, mask.transpose(2, 3).contiguous(), 70))
    assert words.shape == (2, 1, 130, 16)


def test_what_has_the_operand() -> None:
    assert mask_bits.is_there(Plan(mask=True))
    assert not mask_bits.is_there(Plan(keys=True))
