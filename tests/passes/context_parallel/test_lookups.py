"""What lookups and einsum do with the axis of positions: those that pick or pair positions are refused."""

from __future__ import annotations

import pytest
import torch

from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.passes.context_parallel.compiled import BATCH, LENGTH, WIDTH, Before, compile_and_run, positions

MIXING: dict[str, Before] = {
    "einsum over positions": lambda m, x, d: x + torch.einsum("bsd,btd->bsd", x, x),
    "einsum of pairs": lambda m, x, d: x + torch.einsum("bsd,btd->bst", x, x).sum(-1, keepdim=True),
    "gather along the sequence": lambda m, x, d: x.gather(1, d["position_ids"][..., None].expand_as(x)),
    "index along the sequence": lambda m, x, d: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "select along the sequence": lambda m, x, d: x.index_select(1, torch.arange(x.shape[1])),
    "bounds of the sequence": lambda m, x, d: x + m.embedding(torch.bucketize(d["position_ids"], d["position_ids"][0])),
    "einsum of a diagonal": lambda m, x, d: x + torch.einsum("bsd,bsd->b", x, x)[:, None, None],
}

BESIDE: dict[str, Before] = {
    "einsum of features": lambda m, x, d: torch.einsum("bsd,de->bse", x, m.q.weight),
    "table by positions": lambda m, x, d: x + m.embedding.weight[d["position_ids"]],
    "index_select by positions": lambda m, x, d: (
        x + m.embedding.weight.index_select(0, d["position_ids"].flatten()).view_as(x)
    ),
    "gather by positions": lambda m, x, d: (
        x + m.embedding.weight[None, :, 0].expand(BATCH, -1).gather(1, d["position_ids"])[..., None]
    ),
    "index of features": lambda m, x, d: x[..., torch.arange(WIDTH - 1, -1, -1)],
    "buckets": lambda m, x, d: x + m.embedding(torch.bucketize(d["position_ids"], torch.tensor([3, 7]))),
    "einsum of heads": lambda m, x, d: torch.einsum("bsd,bsd->bs", x, x)[..., None] * x,
}


@pytest.mark.parametrize("name", MIXING)
def test_what_reads_some_positions_is_refused(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match="each position of the sequence is computed by itself"):
        compile_and_run(before=MIXING[name], data={"position_ids": positions()})


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_read_for_each_position_is_taken(name: str) -> None:
    out = compile_and_run(before=BESIDE[name], data={"position_ids": positions()})
    assert out.shape == (BATCH, LENGTH, WIDTH)
