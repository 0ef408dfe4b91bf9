"""Grids of persistent kernels, whose programs compute several blocks of queries (kernels/scheduling_sm90.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: bytes of the L2 cache's 50 MB that keys and values may take
_CACHE = 32 * 2**20


def programs(blocks: int, device: torch.device) -> tuple[int, int, int]:
    """Return a grid of a program for each block of queries of all heads, but at most one for each multiprocessor, which runs one at a
    time."""
    return min(blocks, torch.cuda.get_device_properties(device).multi_processor_count), 1, 1


def heads_at_once(heads: int, programs: int) -> int:
    """Return how many heads run at once where blocks of a head wait for each other. Each head has two blocks running, which then
    seldom wait, and all rounds have about as many heads.

    H200 (132 programs), Hopper's backward in one order, causal, D 128, TFLOP/s by heads at once. S 2048 with 128 heads: 16: 269, 32: 305,
    64: 313, 128: 265. S 8192 with 32 heads: 4: 319, 8: 371, 16: 405, 32: 423.
    """
    rounds = -(-heads // max(programs // 2, 1))
    return -(-heads // max(rounds, 1))


def reach(numbers: Mapping[str, Any]) -> int:
    """Return how many keys a query may use at most. numbers: `arguments.common`."""
    found: int = max(min(numbers["band_left"] + numbers["band_right"] + 1, numbers["seqlen_kv"]), 1)
    return found


def section_of(tensors: Sequence[torch.Tensor], *, heads: int, part: float) -> int:
    """Return how many heads take turns where blocks differ in length: such that the used part of these tensors stays in the L2 cache, and
    all sections are about as long."""
    used = int(sum(x.numel() * x.element_size() for x in tensors) * part)
    sections = -(-used // _CACHE)
    return -(-heads // max(sections, 1))


def section(k: torch.Tensor, v: torch.Tensor, *, heads_q: int, reach: int) -> int:
    """Return how many heads take turns where blocks differ in length. The keys and values within their reach then stay in the L2 cache, and
    all sections are about as long."""
    heads_kv, group = k.shape[0] * k.shape[1], heads_q // k.shape[1]
    used = (k.numel() + v.numel()) * k.element_size() * reach // k.shape[2]
    sections = -(-used // _CACHE)
    return -(-heads_kv // max(sections, 1)) * group
