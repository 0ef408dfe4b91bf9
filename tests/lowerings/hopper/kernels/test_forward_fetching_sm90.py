"""Which blocks the warpgroups of the forward share, and where they find them, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_compiler.lowerings.hopper.kernels import forward_fetching_sm90
from tests.lowerings.shared.kernels import gluon_in_torch

HEADS, BATCH, BLOCKS = 3, 2, 5


def scope(program: int = 0, programs: int = 1) -> dict[str, Any]:
    return gluon_in_torch.scope(forward_fetching_sm90, (program,), (programs,))


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("section", [1, 4, 6])
@pytest.mark.parametrize("programs", [1, 4, 30])
def test_every_block_of_every_head_is_some_programs(programs: int, section: int, batch_last: bool) -> None:
    how = types.SimpleNamespace(ORDERED=False, BATCH_LAST=batch_last)
    work = types.SimpleNamespace(
        section=section,
        blocks=BLOCKS,
        heads_of_all=torch.tensor(HEADS * BATCH),
        sizes=types.SimpleNamespace(heads_q=HEADS),
    )
    taken, rounds = [], -(-BLOCKS * HEADS * BATCH // programs)
    for program in range(programs):
        for nth in range(rounds):
            is_one, block, batch, head, row = map(int, scope(program, programs)["nth_block"](nth, work, how))
            assert row == batch * HEADS + head
            if is_one:
                taken.append((batch, head, block))
    assert sorted(taken) == [(b, h, i) for b in range(BATCH) for h in range(HEADS) for i in range(BLOCKS)]
    if programs == section == 1:
        # Batch rows that share a bias follow each other.
        (first, _, _), (second, _, _) = taken[0], taken[BLOCKS]
        assert (first != second) is batch_last


@pytest.mark.parametrize(("consumers", "stages"), [(2, 1), (2, 2), (3, 1)])
def test_queries_do_not_meet_in_shared_memory(consumers: int, stages: int) -> None:
    """Each place alternates between two phases, and has one warpgroup's queries."""
    how = types.SimpleNamespace(CONSUMERS=consumers, QUERY_STAGES=stages)
    place_of_queries = scope()["place_of_queries"]
    seen: dict[int, list[tuple[int, int]]] = {}
    for nth in range(4 * stages):
        for consumer in range(consumers):
            place, phase = place_of_queries(consumer, nth, how)
            seen.setdefault(place, []).append((consumer, phase))
    assert sorted(seen) == list(range(consumers * stages))
    for found in seen.values():
        assert len({consumer for consumer, _ in found}) == 1
        assert [phase for _, phase in found] == [0, 1, 0, 1]


def test_a_block_whose_keys_are_all_masked_visits_one_tile() -> None:
    """What it computes is no number of its rows: there the lse says so."""
    sizes = types.SimpleNamespace(seqlen_q=64, seqlen_kv=300, band_left=0, band_right=torch.tensor(-100))
    how = types.SimpleNamespace(BLOCK_M=64, BLOCK_N=128, HAS_LEFT=False, HAS_RIGHT=True, MASK_ALL=False)
    partial, first, _, full_first, full_last = scope()["tiles_to_visit"](None, torch.tensor(0), sizes, how)
    assert (int(partial), int(first)) == (1, 0)
    assert int(full_first) == int(full_last)
