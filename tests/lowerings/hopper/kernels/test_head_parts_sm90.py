"""A head dim as a sum of powers of two: its parts hold all of it, once, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import head_parts_sm90
from tests.lowerings.shared.kernels import gluon_in_torch

SUMS = [(64, [64]), (80, [64, 16]), (96, [64, 32]), (112, [64, 32, 16]), (128, [128]), (192, [128, 64])]


def scope() -> dict[str, Any]:
    return gluon_in_torch.scope(head_parts_sm90, (0,), (1,))


@pytest.mark.parametrize(("head_dim", "widths"), SUMS)
def test_parts_follow_each_other_wide_ones_first(head_dim: int, widths: list[int]) -> None:
    functions = scope()
    numbers = range(functions["parts_in"](head_dim))
    assert [functions["width_of"](head_dim, n) for n in numbers] == widths
    starts = list(itertools.accumulate(widths, initial=0))
    assert [functions["start_of"](head_dim, n) for n in numbers] == starts[:-1]
    assert starts[-1] == head_dim


def _shared(x: torch.Tensor, widths: list[int]) -> tuple[Any, ...]:
    """Parts of a tile of (positions, dims), as they lie in shared memory."""
    return tuple(gluon_in_torch.Shared(part) for part in x.split(widths, dim=1))


@pytest.mark.parametrize(("head_dim", "widths"), SUMS)
def test_products_of_the_parts_are_those_of_the_whole(head_dim: int, widths: list[int]) -> None:
    functions, generator = scope(), torch.Generator().manual_seed(0)
    q, k = (torch.randn(64, head_dim, generator=generator) for _ in range(2))
    # What was in their place does not count.
    before = torch.full((64, 64), torch.nan)
    scores = functions["scores_of"](_shared(q, widths), _shared(k, widths), before, head_dim)
    torch.testing.assert_close(scores, q @ k.T, rtol=1e-4, atol=1e-4)
    out = functions["outputs_of"](scores, _shared(k, widths), functions["no_outputs"](head_dim), head_dim)
    assert [part.shape[1] for part in out] == widths
    torch.testing.assert_close(torch.cat(out, 1), scores @ k, rtol=1e-4, atol=1e-3)
    factor = torch.arange(64.0)
    scaled = torch.cat(functions["times"](out, factor, head_dim), 1)
    torch.testing.assert_close(scaled, factor[:, None] * torch.cat(out, 1))
    torch.testing.assert_close(
        functions["sums_of"](out, None, head_dim), torch.cat(out, 1).sum(1), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize(("head_dim", "widths"), SUMS)
def test_rows_without_keys_are_zero_whatever_is_there(head_dim: int, widths: list[int]) -> None:
    out = tuple(torch.full((64, width), torch.nan) for width in widths)
    is_empty = torch.arange(64) % 3 == 0
    found = torch.cat(scope()["zero_where"](is_empty, out, head_dim), 1)
    assert (found[is_empty] == 0).all()
    assert found[~is_empty].isnan().all()
