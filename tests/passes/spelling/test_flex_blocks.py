"""Which block masks are shown to be made of a mask, and of which one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from attn_compiler.passes.graph.spelling import Blocks
from attn_compiler.passes.spelling import flex, flex_blocks
from attn_compiler.reasons.decisions import Reason
from tests.passes.compiling import captured


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _found(make: Callable[[Tensor], BlockMask | None], length: int = 200) -> Blocks | Reason:
    def function(x: Tensor) -> Any:
        return flex_attention(x, x, x, block_mask=make(x))

    gm, _ = captured(function, torch.randn(2, 3, length, 16))
    (call,) = (node for node in gm.graph.nodes if flex.is_call(node))
    return flex_blocks.find(call)


@pytest.mark.in_turns
@pytest.mark.parametrize("length", [200, 256])
@pytest.mark.parametrize("size", [128, (64, 32)])
def test_the_dense_mask_that_pytorch_made_them_of(length: int, size: Any) -> None:
    found = _found(lambda x: create_block_mask(_causal, 2, None, length, length, x.device, BLOCK_SIZE=size), length)
    assert isinstance(found, Blocks)
    assert isinstance(found.dense, fx.Node)
    assert found.dense.meta["example_value"].shape == (2, 1, length, length)


def test_no_block_mask_is_one_block() -> None:
    found = _found(lambda _: None)
    assert isinstance(found, Blocks)
    assert found.dense is None


@pytest.mark.parametrize(
    ("make", "observed"),
    [
        (lambda x: _of_lists(x, torch.ones(1, 1, 2), torch.zeros(1, 1, 2, 2)), "is where"),
        (lambda x: create_block_mask(_causal, None, None, 256, 256, x.device)._adjust(200, 200), "is where"),
    ],
    ids=["lists of one's own", "adjusted"],
)
def test_others_are_not_known(make: Callable[[Tensor], BlockMask], observed: str) -> None:
    found = _found(make)
    assert isinstance(found, Reason)
    assert observed in found.observed
    assert found.remedy is not None


def _of_lists(x: Tensor, number: Tensor, indices: Tensor) -> BlockMask:
    return BlockMask.from_kv_blocks(
        number.int() + 0, indices.int() + 0, mask_mod=_causal, seq_lengths=(x.shape[2], x.shape[2])
    )
