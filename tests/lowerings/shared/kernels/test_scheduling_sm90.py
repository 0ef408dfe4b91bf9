"""Which blocks the programs of a persistent kernel take, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.shared.kernels import scheduling_sm90
from tests.lowerings.shared.kernels import gluon_in_torch


def _taken(program: int, programs: int, *, section: int, blocks: int, heads: int) -> list[tuple[int, int]]:
    """Blocks and heads that a program takes, in order."""
    turn = gluon_in_torch.scope(scheduling_sm90, (program,), (programs,))["turn"]
    rounds = -(-blocks * heads // programs)
    found = [tuple(map(int, turn(nth, section, blocks, torch.tensor(heads)))) for nth in range(rounds)]
    return [(block, head) for is_one, block, head in found if is_one]


@pytest.mark.parametrize("section", [1, 4, 6])
@pytest.mark.parametrize("programs", [1, 5, 18])
def test_every_block_of_every_head_is_taken_once(programs: int, section: int) -> None:
    taken = [each for i in range(programs) for each in _taken(i, programs, section=section, blocks=3, heads=6)]
    assert sorted(taken) == [(block, head) for block in range(3) for head in range(6)]


def test_every_other_round_is_in_reverse_order() -> None:
    """So that each program gets about as much: under a causal mask a block grows with its number."""
    firsts = [_taken(i, 4, section=4, blocks=2, heads=4) for i in range(4)]
    assert [[block for block, _ in taken] for taken in firsts] == [[1, 0]] * 4
    assert [taken[0][1] for taken in firsts] == [taken[1][1] for taken in firsts[::-1]]
