"""Which blocks of keys the backward takes, in which order, and which tiles of queries they visit, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import grad_fetching_sm90
from tests.lowerings.shared.kernels import gluon_in_torch

HEADS, BATCH, BLOCKS = 3, 2, 4
#: blocks in the order of their numbers
HOW = types.SimpleNamespace(ORDERED=False, IN_ORDER=False)
#: those of a head one after another
TAKING_TURNS = types.SimpleNamespace(ORDERED=False, IN_ORDER=True)


def scope() -> dict[str, Any]:
    return gluon_in_torch.scope(grad_fetching_sm90, (0,), (1,))


def work(section: int) -> types.SimpleNamespace:
    sizes = types.SimpleNamespace(heads_q=HEADS)
    return types.SimpleNamespace(section=section, blocks=BLOCKS, heads_of_all=torch.tensor(HEADS * BATCH), sizes=sizes)


@pytest.mark.parametrize("section", [1, 4, 6])
def test_every_block_of_keys_is_one_item(section: int) -> None:
    key_block = scope()["_key_block"]
    found = [tuple(map(int, key_block(item, work(section), HOW))) for item in range(BLOCKS * HEADS * BATCH)]
    assert sorted(found) == [(i, b, h) for i in range(BLOCKS) for b in range(BATCH) for h in range(HEADS)]


def test_the_long_ones_come_first() -> None:
    """Under a causal mask the first keys have the most queries. Of several sections this holds of the last: what is short ends the work."""
    key_block = scope()["_key_block"]
    all_items = range(BLOCKS * HEADS * BATCH)
    together = [int(key_block(item, work(HEADS * BATCH), HOW)[0]) for item in all_items]
    assert together == sorted(together)
    last_of_six = [int(key_block(item, work(1), HOW)[0]) for item in all_items][-BLOCKS:]
    assert last_of_six == sorted(last_of_six)


@pytest.mark.parametrize("section", [1, 4, 6])
def test_where_they_take_turns_blocks_of_a_head_come_by_their_numbers(section: int) -> None:
    key_block = scope()["_key_block"]
    items = [tuple(map(int, key_block(item, work(section), TAKING_TURNS))) for item in range(BLOCKS * HEADS * BATCH)]
    for batch in range(BATCH):
        for head in range(HEADS):
            assert [i for i, b, h in items if (b, h) == (batch, head)] == list(range(BLOCKS))


@pytest.mark.parametrize(("block", "masked"), [(0, 1), (1, 1), (2, 1)])
def test_a_block_within_all_keys_masks_its_diagonal_alone(block: int, masked: int) -> None:
    assert _visited(block, seqlen_kv=192) == (masked, 3 - block)


def test_where_keys_end_within_a_block_every_tile_is_masked() -> None:
    masked, visited = _visited(1, seqlen_kv=100)
    assert masked == visited == 2


def _visited(block: int, *, seqlen_kv: int) -> tuple[int, int]:
    """How many tiles of a causal square are masked, and visited. Blocks of 64 of each."""
    sizes = types.SimpleNamespace(
        seqlen_q=torch.tensor(192),
        seqlen_kv=torch.tensor(seqlen_kv),
        band_left=torch.tensor(0),
        band_right=torch.tensor(0),
    )
    given = types.SimpleNamespace(Lists=None, lists=None, sizes=sizes)
    how = types.SimpleNamespace(BLOCK_M=64, BLOCK_N=64, HAS_LEFT=False, HAS_RIGHT=True, MASK_ALL=False)
    partial, _, _, full_first, full_last, masked = scope()["_visits"](given, 0, 0, torch.tensor(block), how)
    return int(masked), int(partial + full_last - full_first)
