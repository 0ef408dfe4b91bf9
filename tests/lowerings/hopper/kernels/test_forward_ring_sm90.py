"""Parts of tiles that have places in turn, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import forward_ring_sm90
from tests.lowerings.shared.kernels import gluon_in_torch
from tests.lowerings.shared.kernels.gluon_in_torch import Shared

KEYS, PART, STAGES = 4, 8, 3


@pytest.fixture
def functions() -> dict[str, Any]:
    return gluon_in_torch.scope(forward_ring_sm90, (0,), (1,))


@pytest.mark.parametrize(("head_dim", "passes"), [(128, 1), (256, 1), (264, 2), (512, 2)])
def test_passes(head_dim: int, passes: int, functions: dict[str, Any]) -> None:
    assert functions["passes_in"](head_dim, 256) == passes


def test_a_part_waits_until_what_was_in_its_place_is_let_go_of_by_all(functions: dict[str, Any]) -> None:
    how = types.SimpleNamespace(STAGES=STAGES, TILE=KEYS, PART=PART)
    barriers = functions["barriers_of_ring"](2, STAGES, 2)
    ring = Shared(torch.arange(STAGES * KEYS * PART).view(STAGES, 1, 1, KEYS, PART).float())
    tiles = types.SimpleNamespace(k=ring)
    for n in range(3 * STAGES):
        place = barriers.full.index(n % STAGES)
        place.expect(0)
        part = functions["part_at"](n, tiles, barriers, how)
        assert torch.equal(part.memory, ring.memory[n % STAGES, 0, 0])
        empty = barriers.empty.index(n % STAGES)
        for _ in range(2):
            assert empty.phase == n // STAGES
            functions["let_go"](n, barriers, how)
        assert empty.phase == n // STAGES + 1
