"""Calls of FlexAttention that are nearly an attention with the mask of their mask_mod, or that ask for more than the attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.near_miss import checking

LENGTH = 160
SHAPE = (checking.BATCH, checking.HEADS, LENGTH, checking.HEAD_DIM)
CASES = checking.Cases()
BLOCKS = "the block mask is shown to be made of its mask_mod"


@pytest.fixture(autouse=True)
def _unfused() -> Iterator[None]:
    """Eager FlexAttention says that it is slow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")
        warnings.filterwarnings("ignore", message="return_lse is deprecated")
        yield


def qkv(*more: Tensor) -> list[Tensor]:
    """FlexAttention has no backward on CPUs."""
    return [*checking.tensors(SHAPE, SHAPE, SHAPE, grad=False), *more]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def made(mask_mod: Any = causal, *sizes: int | None, **kwargs: Any) -> BlockMask:
    return create_block_mask(mask_mod, *(sizes or (None, None)), LENGTH, LENGTH, device="cpu", **kwargs)


# ---- block masks ----------------------------------------------------------------------------------------------------


@CASES.near_miss(checking.described("causal (proved)"), inputs=qkv)
def good(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, block_mask=made())


@CASES.near_miss(checking.described("causal (proved)"), inputs=qkv)
def of_other_sizes(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, block_mask=made(BLOCK_SIZE=(32, 64)))


OUTSIDE = made()


@CASES.near_miss(checking.missed(BLOCKS, "from outside of this graph"), inputs=qkv)
def from_outside(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, block_mask=OUTSIDE)


@CASES.near_miss(checking.missed(BLOCKS, "its mask_mod is"), inputs=qkv)
def whose_function_was_exchanged(q: Tensor, k: Tensor, v: Tensor) -> Any:
    block_mask = made()
    block_mask.mask_mod = lambda b, h, i, j: i > j - 1 + (h > 1).int()
    return flex_attention(q, k, v, block_mask=block_mask)


@CASES.near_miss(checking.missed(BLOCKS, "its mask_mod is"), inputs=lambda: qkv(torch.tensor([3, LENGTH])))
def made_for_one_row_of_the_batch(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
    return flex_attention(q, k, v, block_mask=made(lambda b, h, i, j: (j < lengths[b]) | (i == j)))


@CASES.near_miss(checking.missed(BLOCKS), inputs=qkv)
def without_its_last_blocks(q: Tensor, k: Tensor, v: Tensor) -> Any:
    block_mask = made()
    fewer = block_mask.kv_num_blocks.clamp(max=5)
    return flex_attention(
        q,
        k,
        v,
        block_mask=BlockMask.from_kv_blocks(
            fewer,
            block_mask.kv_indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
            mask_mod=causal,
            seq_lengths=(LENGTH, LENGTH),
        ),
    )


@CASES.near_miss(checking.missed(BLOCKS, "two masks"), inputs=qkv)
def with_full_blocks_of_another(q: Tensor, k: Tensor, v: Tensor) -> Any:
    block_mask, other = made(), made(lambda b, h, i, j: i >= j - 2)
    return flex_attention(
        q,
        k,
        v,
        block_mask=BlockMask.from_kv_blocks(
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            other.full_kv_num_blocks,
            other.full_kv_indices,
            mask_mod=causal,
            seq_lengths=(LENGTH, LENGTH),
        ),
    )


@CASES.near_miss(checking.missed(BLOCKS, "other blocks"), inputs=qkv)
def with_another_block_size(q: Tensor, k: Tensor, v: Tensor) -> Any:
    block_mask = made(BLOCK_SIZE=(64, 128))
    block_mask.BLOCK_SIZE = (128, 64)
    return flex_attention(q, k, v, block_mask=block_mask)


# ---- what else is asked for -----------------------------------------------------------------------------------------


@CASES.near_miss(checking.with_lse, inputs=qkv)
def with_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, return_lse=True)


@CASES.near_miss(checking.described("scale 0.353553"), inputs=qkv)
def with_logsumexp_that_nobody_reads(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out, lse = flex_attention(q, k, v, return_lse=True)
    _ = lse.to(torch.float16)  # type: ignore[union-attr]
    return out


@CASES.near_miss(checking.missed("asked for nothing special", "BLOCK_M=64"), inputs=qkv)
def with_tiles(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, kernel_options={"BLOCK_M": 64})


@CASES.near_miss(checking.described("scale 0.353553"), inputs=qkv)
def with_options_as_they_are(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, kernel_options={"PRESCALE_QK": False})


# ---- score_mod ------------------------------------------------------------------------------------------------------


@CASES.near_miss(checking.missed("", "pow"), inputs=qkv)
def scores_squared(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s**2)


@CASES.near_miss(checking.described("dense", because=""), inputs=lambda: qkv(checking.normal(checking.HEADS, LENGTH)))
def numbers_of_the_queries(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i] * (j % 3))


@CASES.near_miss(checking.described("causal"), inputs=qkv)
def masked_only_by_a_low_number(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -1e30))


@CASES.near_miss(checking.missed(""), inputs=qkv)
def masked_by_a_number_that_is_not_low(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -5.0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flex(case: checking.Case) -> None:
    checking.check(case)
