"""How ranks meet: what is said is compared, calls of compiled code wait for each other, and who does something else ends all of them.

The other rank is a thread's or this test's own entries in the store.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from attn_compiler.torch_private import rank_sync
from attn_compiler.torch_private.rank_sync import TOLD, RanksDisagree
from tests.meshes import fake_mesh


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    found = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: found)
    return found


@pytest.fixture
def group(store: dist.HashStore) -> Iterator[str]:
    """Of two ranks, of which this process is the first."""
    with fake_mesh(2) as mesh:
        yield str(mesh.get_group().group_name)


def _later(store: dist.HashStore, key: str, value: str | None = None) -> threading.Timer:
    """The other rank comes in a moment. value: what it says; without one it enters a call."""
    timer = threading.Timer(0.1, lambda: store.add(key, 1) if value is None else store.set(key, value))
    timer.start()
    return timer


def test_what_is_told_is_not_compared(store: dist.HashStore, group: str) -> None:
    store.set("attn_compiler/0-1/1/1", f"same{TOLD}x: strides (1, 2)")
    rank_sync.agree(group, "graph", f"same{TOLD}x: strides (2, 1)", seconds=5)
    assert not rank_sync.is_at_odds(group)


def test_only_the_lines_that_differ_are_said(store: dist.HashStore, group: str) -> None:
    store.set("attn_compiler/0-1/1/1", f"compiles\nmethod: 'ring'\npacked: False{TOLD}x: int32")
    with pytest.raises(RanksDisagree) as caught:
        rank_sync.agree(group, "graph", f"compiles\nmethod: 'auto'\npacked: False{TOLD}x: int64", seconds=5)
    assert str(caught.value) == "rank 0: method: 'auto', x: int64; rank 1: method: 'ring', x: int32"
    assert rank_sync.is_at_odds(group)


def test_a_failure_is_not_held_against_what_a_call_is_given(store: dist.HashStore, group: str) -> None:
    store.set("attn_compiler/0-1/1/1", "could not compile: MemoryError")
    with pytest.raises(RanksDisagree, match=r"^rank 0: compiles; rank 1: could not compile: MemoryError$"):
        rank_sync.agree(group, "graph", f"compiles\nmethod: 'auto'{TOLD}x: int64", seconds=5)


def test_a_call_waits_for_the_others(store: dist.HashStore, group: str) -> None:
    timer = _later(store, "attn_compiler/0-1/0/runs/code")
    rank_sync.enter(group, "code", "runs")
    timer.join()
    store.add("attn_compiler/0-1/0/runs/code", 1)
    rank_sync.enter(group, "code", "runs")


def test_calls_leave_nothing_in_the_store(store: dist.HashStore, group: str) -> None:
    store.add("attn_compiler/0-1/0/runs/code", 50)
    rank_sync.enter(group, "code", "runs")
    before = store.num_keys()
    for _ in range(20):
        rank_sync.enter(group, "code", "runs")
    assert store.num_keys() == before


def test_a_rank_that_compiles_instead_ends_a_call(store: dist.HashStore, group: str) -> None:
    timer = _later(store, "attn_compiler/0-1/1/1", f"compiles{TOLD}x: int32")
    with pytest.raises(RanksDisagree, match="rank 0: runs, x: int64; rank 1: compiles, x: int32"):
        rank_sync.enter(group, "code", f"runs{TOLD}x: int64")
    timer.join()
    assert store.get("attn_compiler/0-1/1/0").decode() == f"runs{TOLD}x: int64"


def test_a_rank_that_runs_other_code_ends_a_call(store: dist.HashStore, group: str) -> None:
    store.set("attn_compiler/0-1/0/waits/1", "1 other")
    timer = _later(store, "attn_compiler/0-1/1/1", "runs other")
    with pytest.raises(RanksDisagree, match="rank 0: runs code; rank 1: runs other"):
        rank_sync.enter(group, "code", "runs code")
    timer.join()


def test_that_a_rank_waited_in_an_earlier_call_says_nothing(store: dist.HashStore, group: str) -> None:
    store.add("attn_compiler/0-1/0/runs/code", 1)
    rank_sync.enter(group, "code", "runs code")
    store.set("attn_compiler/0-1/0/waits/1", "1 other")
    timer = threading.Timer(0.5, lambda: store.add("attn_compiler/0-1/0/runs/code", 1))
    timer.start()
    rank_sync.enter(group, "code", "runs code")
    timer.join()


def test_a_call_waits_no_longer_than_the_store(store: dist.HashStore, group: str) -> None:
    store.set_timeout(datetime.timedelta(seconds=1))
    with pytest.raises(RanksDisagree, match="a rank did not come to this call"):
        rank_sync.enter(group, "code", "runs")


def test_groups_of_the_same_ranks_count_together(store: dist.HashStore, group: str) -> None:
    rank_sync.say(group, "one")
    other = str(dist.new_group([0, 1]).group_name)
    assert rank_sync.say(other, "two")[0] == "attn_compiler/0-1/2/0"


def test_another_store_is_begun_anew(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_sync.say(group, "one")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    assert rank_sync.say(group, "one")[0] == "attn_compiler/0-1/1/0"


def test_a_fake_group_has_nobody_to_meet(group: str) -> None:
    assert rank_sync.is_fake(group)
    assert rank_sync.rank_of(group) == 0
    assert rank_sync.ranks_of(group) == {0, 1}
