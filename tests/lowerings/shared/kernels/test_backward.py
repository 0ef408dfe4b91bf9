"""What the passes over queries leave for those over keys; the gradients are test_triton_launch.py's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_compiler.lowerings.triton import launch
from tests.lowerings.kernel_cases import BY_NAME
from tests.lowerings.kernel_problems import Problem, build, outputs, planned


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
