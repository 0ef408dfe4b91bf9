"""What ranks send each other to merge: one collective, in the dtype of the logsumexp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_compiler.context_parallel import merge_ops as torch_merges
from attn_compiler.context_parallel.merging import merged

SIZE = 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_outputs_and_logsumexps_travel_together(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_sinks: bool
) -> None:
    sent: list[Tensor] = []

    def parts(x: Tensor, size: int, group: str) -> Tensor:
        sent.append(x)
        return torch.stack([x * (rank + 1) for rank in range(size)])

    monkeypatch.setattr(torch_merges, "parts", parts)
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = torch.randn(2, 4, 1, 8).to(dtype), torch.randn(2, 4, 1, dtype=wide)
    sinks = torch.randn(4) if has_sinks else None
    found = torch.ops.attn_compiler.merged_over_ranks(out, lse, sinks, SIZE, "g")
    (one,) = sent
    assert one.shape == (2, 4, 1, 9)
    assert one.dtype == wide
    assert found.dtype == dtype
    outs, lses = (torch.stack([x.to(wide) * (rank + 1) for rank in range(SIZE)]) for x in (out, lse))
    assert found.equal(merged(outs, lses, sinks).to(dtype))
