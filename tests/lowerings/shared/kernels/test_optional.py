"""Operands that are there or not, and what the forward kernel relies on alone."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import triton
import triton.language as tl

from attn_compiler.lowerings.shared.kernels import optional
from attn_compiler.lowerings.shared.kernels.tuples import ListStrides
from attn_compiler.lowerings.shared.ops.listing import SURPLUS
from tests.lowerings.kernel_cases import BY_NAME
from tests.lowerings.kernel_problems import SMALL, build, outputs

# Operands that are there or not, on any device.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, LENGTH = 16, 11


@triton.jit
def _sums(Table, Rows, Slopes, Tiles, Out, table_b, table_h, rows_b, length, ROWS: tl.constexpr):
    """Out: (B, H, ROWS): all that is there, added up."""
    head, batch = tl.program_id(0), tl.program_id(1)
    offsets = tl.arange(0, ROWS)
    inside = offsets < length
    total = tl.zeros([ROWS, 1], tl.float32)
    table = optional.load_column(optional.of_head(Table, batch, head, table_b, table_h), offsets, inside)
    if table is not None:
        total += table
    rows = optional.at_index(Rows, batch, rows_b)
    lower, upper = optional.load_column(rows, offsets, inside), optional.load_upper(rows, length, offsets, inside)
    if lower is not None:
        total += lower + 2 * upper
    slope = optional.load_one(Slopes, head)
    if slope is not None:
        total += slope
    found = optional.list_of(Tiles, batch, head, head, ListStrides(tiles_b=4, tiles_h=2, tiles_row=1))
    if found is not None:
        total += tl.load(found)
    place = Out + (batch * tl.num_programs(0) + head) * ROWS + offsets[:, None]
    tl.store(place, total)


@pytest.mark.parametrize("here", itertools.product((False, True), repeat=4), ids=str)
def test_what_is_absent_adds_nothing(here: tuple[bool, ...]) -> None:
    batch, heads = 2, 2
    table = torch.randn(batch, heads, LENGTH, device=DEVICE)
    rows = torch.randint(0, 9, (batch, 2, LENGTH), device=DEVICE)
    slopes, tiles = torch.randn(heads, device=DEVICE), torch.randn(batch * 4, device=DEVICE)
    out = torch.full((batch, heads, ROWS), torch.nan, device=DEVICE)
    given = [x if present else None for x, present in zip((table, rows, slopes, tiles), here, strict=True)]
    _sums[(heads, batch)](*given, out, table.stride(0), table.stride(1), rows.stride(0), LENGTH, ROWS=ROWS)
    expected = torch.zeros_like(out)
    if here[0]:
        expected[:, :, :LENGTH] += table
    if here[1]:
        expected[:, :, :LENGTH] += (rows[:, 0] + 2 * rows[:, 1])[:, None]
    if here[2]:
        expected += slopes[None, :, None]
    if here[3]:
        expected += tiles.view(batch, 4)[:, [0, 3], None]
    torch.testing.assert_close(out, expected)


@triton.jit
def _rows(Keys, Documents, Out, length, SIZE: tl.constexpr):
    """Out: (SIZE,): 1 where a key may be used, and its document's number."""
    keys = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.int32)
    allowed = optional.load_keys(Keys, keys, keys < length)
    if allowed is not None:
        total += allowed.to(tl.int32)
    documents = optional.load_row(Documents, keys, keys < length)
    if documents is not None:
        total += documents
    tl.store(Out + keys, total)


@pytest.mark.parametrize("here", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_what_masks_say_of_keys_is_nothing_beyond_the_last_one(here: tuple[bool, bool]) -> None:
    keys = torch.arange(ROWS, device=DEVICE).remainder(3).to(torch.uint8)
    documents = torch.arange(10, 10 + ROWS, device=DEVICE, dtype=torch.int32)
    out = torch.full((ROWS,), -1, device=DEVICE, dtype=torch.int32)
    _rows[(1,)](keys if here[0] else None, documents if here[1] else None, out, LENGTH, SIZE=ROWS)
    expected = (keys != 0).int() * here[0] + documents * here[1]
    assert torch.equal(out[:LENGTH], expected[:LENGTH])
    assert not out[LENGTH:].any()


# What the forward kernel relies on alone.

#: without gradients there is one list alone
CASE = dataclasses.replace(
    BY_NAME["keys_right"], needs_grad=False, seqlen_q=3 * SMALL.queries, seqlen_kv=3 * SMALL.keys
)


def test_lists_alone_say_what_is_visited() -> None:
    problem = build(CASE)
    before = outputs(problem)
    problem.named["tiles"][:, :, 1, :3] = 0
    out, lse = outputs(problem)
    emptied = slice(SMALL.queries, 2 * SMALL.queries)
    assert not out[:, :, emptied].any()
    assert torch.all(lse[:, :, emptied] == -torch.inf)
    others = torch.ones(CASE.seqlen_q, dtype=torch.bool, device=out.device)
    others[emptied] = False
    for now, then in zip((out, lse), before, strict=True):
        assert torch.equal(now[:, :, others], then[:, :, others])


def test_the_order_of_masked_tiles_does_not_matter() -> None:
    """Every tile is masked, so that the list may name them in any order."""
    problem = build(dataclasses.replace(BY_NAME["mask_hqk"], needs_grad=False, seqlen_q=33, seqlen_kv=3 * SMALL.keys))
    before = outputs(problem)
    tiles = problem.named["tiles"][:, :, :-SURPLUS]
    assert torch.all(tiles[..., 0] == 3)
    tiles[..., 3:6] = tiles[..., 3:6].flip(-1).clone()
    for now, then in zip(outputs(problem), before, strict=True):
        torch.testing.assert_close(now, then)
