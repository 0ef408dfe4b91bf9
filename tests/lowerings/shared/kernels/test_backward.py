"""Kernels of gradients: what the passes over queries leave for those over keys, what is needed of each row, and the last sums."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_compiler.lowerings.shared.kernels.row_stats import make_row_stats, minus_lse, row_stats, store_row_stats
from attn_compiler.lowerings.shared.kernels.sums_backward import (
    attention_grad_sinks,
    attention_sum_diagonals,
    store_diagonals,
)
from attn_compiler.lowerings.shared.kernels.tuples import Strides
from attn_compiler.lowerings.shared.parts.kernel_plan import Call
from attn_compiler.lowerings.triton import launch
from tests.lowerings.kernel_cases import BY_NAME
from tests.lowerings.kernel_problems import Problem, build, outputs, planned, results


# What the passes over queries leave for those over keys.
def stats_of(problem: Problem, kernel: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-lse and delta as a kernel stores them, (B, H, rows) each; lse and delta from their definitions, (B, H, Sq)."""
    with torch.no_grad():
        out, lse = outputs(problem)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        with planned(problem.plan):
            shared = launch.begin_backward(
                grad_out, grad_lse, problem.q, problem.k, problem.v, problem.operands, out, lse, problem.text
            )
            shared.tensors["RowStats"].fill_(torch.nan)
            single = launch.single_gradients(shared)
            if kernel == "grad_q":
                shared.tensors["RowStats"].fill_(torch.nan)
                single["grad_q"]()
    stored = shared.tensors["RowStats"]
    delta = (out * grad_out).sum(-1) - grad_lse
    return stored[:, :, 0], stored[:, :, 1], lse, delta.masked_fill(lse == -torch.inf, 0.0)


@pytest.mark.in_turns
@pytest.mark.parametrize("kernel", ["row_stats", "grad_q"])
@pytest.mark.parametrize("name", ["causal", "keys_none", "sinks"])
def test_row_stats_fill_whole_blocks(name: str, kernel: str) -> None:
    """The pass over keys reads them without a bound: beyond the last row, and in rows without a key, every weight is to be 0, and so is
    what a loss puts on such a row."""
    problem = build(BY_NAME[name])
    base, delta, lse, expected_delta = stats_of(problem, kernel)
    rows = lse.shape[2]
    expected = torch.where(lse == -torch.inf, -torch.inf, -lse / math.log(2))
    torch.testing.assert_close(base[:, :, :rows], expected)
    torch.testing.assert_close(delta[:, :, :rows], expected_delta, rtol=1e-4, atol=1e-4)
    assert base.shape[2] > rows
    assert torch.all(base[:, :, rows:] == -torch.inf)
    assert torch.isfinite(delta[:, :, rows:]).all()


# A pass over keys for one of the two gradients.
def apart(problem: Problem) -> Problem:
    call = Call.from_text(problem.text)
    grad_kv = dataclasses.replace(call.tiles.grad_kv, apart=True)
    text = dataclasses.replace(call, tiles=dataclasses.replace(call.tiles, grad_kv=grad_kv)).to_text()
    return dataclasses.replace(problem, text=text)


@pytest.mark.parametrize("name", ["gqa", "keys_holes", "dropout", "bias_hqk_causal", "softcap"])
def test_each_gradient_alone_is_what_both_are_together(name: str) -> None:
    problem = build(BY_NAME[name])
    together, alone = results(problem), results(apart(problem))
    labels = problem.labels
    for label, one, other in zip(labels, together, alone, strict=True):
        assert torch.equal(one, other), label


# What a backward needs of each row.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, LENGTH, BLOCK, DIM, ROWS = 2, 3, 21, 16, 16, 32


@triton.jit
def _made(
    Out, GradOut, Lse, GradLse, Stats, o_b, o_h, o_s, g_b, g_h, g_s, heads, length, rows,
    BLOCK_M: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    stride_o, stride_g = Strides(b=o_b, h=o_h, s=o_s), Strides(b=g_b, h=g_h, s=g_s)
    make_row_stats(
        Out, GradOut, Lse, GradLse, Stats, stride_o, stride_g, tl.program_id(0) * BLOCK_M, tl.program_id(1),
        tl.program_id(2), heads, length, rows, BLOCK_M, DIM, DIM, 1,
    )  # fmt: skip


def _stats(out: torch.Tensor, grad_out: torch.Tensor, lse: torch.Tensor, grad_lse: torch.Tensor) -> torch.Tensor:
    stats = torch.full((BATCH, HEADS, 2, ROWS), torch.nan, device=DEVICE)
    given = (x.to(DEVICE) for x in (out, grad_out, lse, grad_lse))
    strides = (*out.stride()[:3], *grad_out.stride()[:3])
    _made[(ROWS // BLOCK, HEADS, BATCH)](*given, stats, *strides, HEADS, LENGTH, ROWS, BLOCK_M=BLOCK, DIM=DIM)
    return stats.cpu()


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    out, grad_out = (torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator) for _ in range(2))
    lse, grad_lse = (torch.randn(BATCH, HEADS, LENGTH, generator=generator) for _ in range(2))
    return out, grad_out, lse, grad_lse


def test_they_are_what_they_are_said_to_be() -> None:
    out, grad_out, lse, grad_lse = _inputs()
    # Of BSHD: heads are not the slowest axis but one.
    grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    stats = _stats(out, grad_out, lse, grad_lse)
    torch.testing.assert_close(stats[:, :, 0, :LENGTH], -lse / math.log(2))
    torch.testing.assert_close(stats[:, :, 1, :LENGTH], (out * grad_out).sum(-1) - grad_lse, atol=1e-5, rtol=1e-5)


def test_rows_beyond_the_last_weigh_nothing() -> None:
    stats = _stats(*_inputs())
    assert (stats[:, :, 0, LENGTH:] == -math.inf).all()
    assert (stats[:, :, 1, LENGTH:] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_put_on_a_row_without_keys_does_not_count(value: float) -> None:
    out, grad_out, lse, grad_lse = _inputs()
    clean = _stats(out, grad_out, lse, grad_lse)
    out[0, 1, 4], lse[0, 1, 4] = 0.0, -math.inf
    grad_out[0, 1, 4], grad_lse[0, 1, 4] = value, value
    stats = _stats(out, grad_out, lse, grad_lse)
    assert (stats[0, 1, 0, 4], stats[0, 1, 1, 4]) == (-math.inf, 0.0)
    stats[0, 1, :, 4] = clean[0, 1, :, 4]
    assert torch.equal(stats, clean)


@triton.jit
def _again(Lse, Stats, Out, length, rows, ROWS: tl.constexpr):
    offsets = tl.arange(0, ROWS)
    base = minus_lse(Lse, offsets, length)
    store_row_stats(Stats, offsets, rows, base, offsets.to(tl.float32))
    base, delta = row_stats(Stats, offsets, rows)
    tl.store(Out + offsets, tl.where(base == float("-inf"), -1.0, base + delta))


def test_what_is_stored_is_what_is_read() -> None:
    lse = torch.zeros(LENGTH, device=DEVICE)
    stats, found = torch.zeros(2 * ROWS, device=DEVICE), torch.zeros(ROWS, device=DEVICE)
    _again[(1,)](lse, stats, found, LENGTH, ROWS, ROWS=ROWS)
    assert found.tolist() == [*map(float, range(LENGTH)), *[-1.0] * (ROWS - LENGTH)]


# The last sums of gradients against plain loops, on any device.
@triton.jit
def _store(Tile, Sums, SIZE: tl.constexpr):
    tile = tl.load(Tile + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    store_diagonals(Sums, tile, SIZE)


def along_diagonals(tile: Tensor) -> Tensor:
    """(2 · size,): sums of a tile at each distance k - q from -size on."""
    size = tile.shape[0]
    return torch.stack([tile.diagonal(d).sum() for d in range(-size, size)])


@pytest.mark.parametrize("size", [16, 64])
def test_a_tile_along_its_diagonals(size: int) -> None:
    tile = torch.randn(size, size, generator=torch.Generator().manual_seed(size))
    sums = torch.full((2 * size,), float("nan"), device=DEVICE)
    _store[(1,)](tile.to(DEVICE), sums, SIZE=size)
    torch.testing.assert_close(sums.cpu(), along_diagonals(tile))


@pytest.mark.parametrize("span_blocks", [1, 2, None], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (16, 16), (5, 40), (37, 3), (33, 50)])
def test_every_pair_goes_to_its_distance_once(seqlen_q: int, seqlen_kv: int, span_blocks: int | None) -> None:
    size, phases, length = 16, 8, 112
    blocks_q, blocks_k = -(-seqlen_q // size), -(-seqlen_kv // size)
    of_a_span = span_blocks or blocks_q
    generator = torch.Generator().manual_seed(seqlen_q)
    pairs = torch.zeros(2, blocks_q * size, blocks_k * size)
    pairs[:, :seqlen_q, :seqlen_kv] = torch.randn(2, seqlen_q, seqlen_kv, generator=generator)
    tiles = pairs.view(2, blocks_q, size, blocks_k, size).permute(0, 1, 3, 2, 4)
    sums = torch.zeros(2, -(-blocks_q // of_a_span), blocks_k + of_a_span - 1, 2 * size)
    for head, block_q, block_k in itertools.product(range(2), range(blocks_q), range(blocks_k)):
        span, within = block_q // of_a_span, block_q % of_a_span
        sums[head, span, block_k - within + of_a_span - 1] += along_diagonals(tiles[head, block_q, block_k])
    expected = torch.zeros(2, length)
    for q, k in itertools.product(range(seqlen_q), range(seqlen_kv)):
        expected[:, k - q + seqlen_q - 1] += pairs[:, q, k]

    grad = torch.full((2, phases, length), float("nan"), device=DEVICE)
    strides = (grad.stride(0), grad.stride(1), length)
    given = (*strides, sums.shape[1], sums.shape[2], of_a_span, seqlen_q, seqlen_q + seqlen_kv - 1)
    attention_sum_diagonals[(2, 2, 1)](sums.to(DEVICE), grad, *given, SIZE=size, PHASES=phases, BLOCK=64)
    torch.testing.assert_close(grad[:, 0].cpu(), expected)
    assert not grad[:, 1:].any()


def test_sinks_sum_over_all_rows_but_those_without_a_weight() -> None:
    batch, heads, rows = 3, 2, 128
    generator = torch.Generator().manual_seed(0)
    lse, delta = (
        torch.randn(batch, heads, rows, generator=generator),
        torch.randn(batch, heads, rows, generator=generator),
    )
    lse[:, :, 100:] = float("inf")
    sinks = torch.randn(heads, generator=generator)
    stats = torch.stack((-lse * 1.4426950408889634, delta), dim=2)
    grad = torch.empty(heads, device=DEVICE)
    attention_grad_sinks[(heads, 1, 1)](stats.to(DEVICE), sinks.to(DEVICE), grad, batch, heads, rows, BLOCK=64)
    expected = -(torch.exp(sinks[None, :, None] - lse) * delta).sum((0, 2))
    torch.testing.assert_close(grad.cpu(), expected)
