"""How long it takes to read a cache, and to do nothing else: what bench_decode.py measures kernels against."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.decode_cases import Problem

#: (programs of a head's keys and values, elements of a tile, warps)
WAYS = tuple((chunks, tile, warps) for chunks in (1, 2, 4, 8, 16, 32, 64) for tile, warps in ((8192, 4), (16384, 8)))
#: programs at least and at most
_FEWEST, _MOST = 120, 1100


@triton.jit
def _read(K, V, Out, stride: tl.int64, size, TILE: tl.constexpr):
    """Grid: (chunks, heads). Each program adds up its share of the first `size` elements of a head's K and V."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    share = tl.cdiv(tl.cdiv(size, tl.num_programs(0)), TILE) * TILE
    begin = chunk * share
    end = tl.minimum(begin + share, size)
    at = tl.arange(0, TILE)
    K += head.to(tl.int64) * stride
    V += head.to(tl.int64) * stride
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(begin, end, TILE):
        inside = start + at < end
        k = tl.load(K + start + at, mask=inside, other=0.0)
        v = tl.load(V + start + at, mask=inside, other=0.0)
        total += k.to(tl.float32) + v.to(tl.float32)
    tl.store(Out + head * tl.num_programs(0) + chunk, tl.sum(total))


def ways(problem: Problem) -> Iterator[list[Callable[[], Tensor]]]:
    """Ways to read the used part of every cache once, from each of a number of grids; none where K and V have different sizes."""
    case = problem.case
    heads = case.batch * case.heads_kv
    if case.width_v != case.head_dim:
        return
    for chunks, tile, warps in WAYS:
        programs = chunks * heads
        if programs < _FEWEST or (programs > _MOST and chunks > 1) or case.used * case.head_dim < chunks * tile:
            continue
        yield [_reading(k, v, chunks, tile, warps, case.used) for k, v in problem.caches]


def _reading(k: Tensor, v: Tensor, chunks: int, tile: int, warps: int, keys: int) -> Callable[[], Tensor]:
    batch, heads, length, width = k.shape
    out = torch.empty(batch * heads * chunks, dtype=torch.float32, device=k.device)

    def run() -> Tensor:
        _read[(chunks, batch * heads)](k, v, out, length * width, keys * width, TILE=tile, num_warps=warps)
        return out

    return run
