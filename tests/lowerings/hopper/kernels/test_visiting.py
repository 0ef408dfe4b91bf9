"""Which tiles a block visits, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import visiting
from tests.lowerings.shared.kernels import gluon_in_torch


def _visited(visits: types.SimpleNamespace) -> list[int]:
    """The tiles of a block, in order."""
    nth_tile = gluon_in_torch.scope(visiting, (0,), (1,))["nth_tile"]
    count = visits.partial + visits.full_last - visits.full_first
    return [int(nth_tile(torch.tensor(i), visits)) for i in range(count)]


def test_tiles_that_need_their_mask_come_before_those_that_do_not() -> None:
    """Those of a band lie before and behind the full ones."""
    band = types.SimpleNamespace(List=None, partial=3, first=2, second=2, full_first=4, full_last=9)
    assert _visited(band) == [2, 3, 9, 4, 5, 6, 7, 8]


def test_without_full_tiles_all_need_their_mask() -> None:
    band = types.SimpleNamespace(List=None, partial=2, first=5, second=5, full_first=7, full_last=7)
    assert _visited(band) == [5, 6]


@pytest.mark.parametrize("partial", [0, 1, 2, 4])
def test_a_list_names_them_one_by_one(partial: int) -> None:
    """Whatever is between them. The first two come with the list's head."""
    named = [11, 20, 23, 31][:partial]
    row = torch.tensor([partial, 40, 42, *named, 0, 0], dtype=torch.int32)
    visits = types.SimpleNamespace(
        List=gluon_in_torch.Pointer(row),
        partial=partial,
        first=int(row[3]),
        second=int(row[4]),
        full_first=40,
        full_last=42,
    )
    assert _visited(visits) == [*named, 40, 41]
