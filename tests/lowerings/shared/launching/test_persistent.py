"""Grids of kernels whose programs stay for several blocks."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.lowerings.shared.launching import persistent


def _bytes(heads: int, seqlen: int) -> torch.Tensor:
    return torch.empty((2, heads, seqlen, 128), dtype=torch.uint8, device="meta")


def test_heads_that_take_turns_share_the_cache() -> None:
    """64 heads of 8192 keys and values, of which 32 MB are used at a time."""
    k = _bytes(heads=32, seqlen=8192)
    assert persistent.section(k, k, heads_q=32, reach=8192) == 16
    # Within a window of 1024 keys all heads' fit.
    assert persistent.section(k, k, heads_q=32, reach=1024) == 64


def test_heads_of_one_head_of_keys_stay_together() -> None:
    k = _bytes(heads=8, seqlen=8192)
    assert persistent.section(k, k, heads_q=32, reach=8192) == 64


def test_halves_take_twice_the_room() -> None:
    k = _bytes(heads=32, seqlen=8192).to(torch.bfloat16)
    assert persistent.section(k, k, heads_q=32, reach=8192) == 8


@pytest.mark.parametrize(
    ("heads", "programs", "at_once"),
    [(32, 132, 32), (66, 132, 66), (128, 132, 64), (256, 132, 64), (200, 132, 50), (3, 1, 1), (1, 132, 1), (0, 132, 0)],
)
def test_heads_at_once_have_two_blocks_under_way_each(heads: int, programs: int, at_once: int) -> None:
    assert persistent.heads_at_once(heads, programs) == at_once


def test_reach_is_what_a_band_lets_a_query_see() -> None:
    far = 1 << 30
    assert persistent.reach({"band_left": far, "band_right": 0, "seqlen_kv": 4096}) == 4096
    assert persistent.reach({"band_left": 100, "band_right": 7, "seqlen_kv": 4096}) == 108
    assert persistent.reach({"band_left": -100, "band_right": 7, "seqlen_kv": 4096}) == 1
