"""What the forward kernel relies on alone; its numbers, for every part of a plan, are test_triton_launch.py's."""

from __future__ import annotations

import dataclasses

import torch

from attn_compiler.lowerings.shared.ops.listing import SURPLUS
from tests.lowerings.kernel_cases import BY_NAME
from tests.lowerings.kernel_problems import SMALL, build, outputs

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
