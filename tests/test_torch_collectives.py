"""Ranks say what they compiled, and hear where another one says something else."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from attn_compiler import torch_collectives
from attn_compiler.torch_collectives import RanksDisagree, agree
from tests.meshes import fake_mesh


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """Of two ranks, of which this process is the first."""
    found = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: found)
    return found


def _says(store: dist.HashStore, times: int, text: str) -> None:
    store.set(f"attn_compiler/0-1/{times}/1", text)


def test_ranks_that_say_the_same_agree_whatever_they_call_it(store: dist.HashStore) -> None:
    """A rank that compiled something else before has other names for its graphs."""
    _says(store, 1, "one")
    _says(store, 2, "two")
    with fake_mesh(2) as mesh:
        group = mesh.get_group().group_name
        agree(group, "graph 0/0", "one", seconds=5)
        agree(group, "graph 7/0", "two", seconds=5)


def test_another_answer_raises_at_once(store: dist.HashStore) -> None:
    _says(store, 1, "6 positions")
    with fake_mesh(2) as mesh, pytest.raises(RanksDisagree, match="rank 0: 8 positions; rank 1: 6 positions"):
        agree(mesh.get_group().group_name, "graph 0/0", "8 positions", seconds=60)


def test_no_answer_raises_after_a_while(store: dist.HashStore) -> None:
    with fake_mesh(2) as mesh, pytest.raises(RanksDisagree, match="rank 1 did not compile graph 0/0 within 1 s"):
        agree(mesh.get_group().group_name, "graph 0/0", "8 positions", seconds=1)


def test_a_rank_is_a_place_in_its_group() -> None:
    with fake_mesh(2, 2, rank=3, names=("dp", "cp")) as mesh:
        assert torch_collectives.rank_of(mesh["cp"].get_group().group_name) == 1
