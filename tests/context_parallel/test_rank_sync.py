"""Compiled code meets the other ranks before it runs, and a rank that can't compile tells them."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from attn_compiler import ContextParallel
from attn_compiler.context_parallel import rank_sync
from attn_compiler.context_parallel.rank_sync import TOLD, Meeting, RanksDisagree
from attn_compiler.options.options import Options
from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.meshes import fake_mesh

_is_fake = rank_sync.is_fake
_MEETING = Meeting(group="0", code="abc", told="runs")


@pytest.fixture(autouse=True)
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sync, "is_fake", lambda _: False)


def test_each_call_meets_every_group_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(rank_sync, "enter", lambda group, code, told: done.append(f"{group} {code} {told}"))
    other = Meeting(group="1", code="def", told="runs too")
    call = rank_sync.in_step(lambda x: done.append(x), [_MEETING, other])
    call("first")
    call("second")
    assert done == ["0 abc runs", "1 def runs too", "first", "0 abc runs", "1 def runs too", "second"]


def test_code_runs_on_no_rank_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(*_: str) -> None:
        raise RanksDisagree("rank 0: runs; rank 1: compiles")

    def compiled() -> None:
        raise AssertionError

    monkeypatch.setattr(rank_sync, "enter", enter)
    with pytest.raises(ContextParallelUnsupported, match="rank 0: runs; rank 1: compiles"):
        rank_sync.in_step(compiled, [_MEETING])()


def test_code_without_meetings_is_what_it_was() -> None:
    assert rank_sync.in_step(len, []) is len


def test_a_fake_group_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sync, "is_fake", lambda _: True)
    assert rank_sync.in_step(len, [_MEETING]) is len


def _told(monkeypatch: pytest.MonkeyPatch, error: Exception, *, at_odds: bool = False, size: int = 2) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(rank_sync, "is_at_odds", lambda _: at_odds)
    monkeypatch.setattr(rank_sync, "send", lambda _, text: said.append(text))
    with fake_mesh(size) as mesh:
        options = Options(context_parallel=ContextParallel(mesh))
        telling = rank_sync.telling_of_failure(options.sequence_group, lambda found: isinstance(found, KeyError))
        with pytest.raises(type(error)), telling:
            raise error
    return said


def test_the_others_are_told_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = _told(monkeypatch, MemoryError("all of it"))
    assert said.startswith("could not compile: MemoryError: all of it")


def test_they_are_not_told_twice_of_what_starts_over_or_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _told(monkeypatch, MemoryError(), at_odds=True) == []
    assert _told(monkeypatch, KeyError()) == []
    assert _told(monkeypatch, MemoryError(), size=1) == []


# How ranks meet.
@pytest.fixture
def group_store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    found = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: found)
    return found


@pytest.fixture
def group(group_store: dist.HashStore) -> Iterator[str]:
    """Of two ranks, of which this process is the first."""
    with fake_mesh(2) as mesh:
        yield str(mesh.get_group().group_name)


def _later(group_store: dist.HashStore, key: str, value: str | None = None) -> threading.Timer:
    """The other rank comes in a moment. value: what it says; without one it enters a call."""
    timer = threading.Timer(0.1, lambda: group_store.add(key, 1) if value is None else group_store.set(key, value))
    timer.start()
    return timer


def test_what_is_told_is_not_compared(group_store: dist.HashStore, group: str) -> None:
    group_store.set("attn_compiler/0-1/1/1", f"same{TOLD}x: strides (1, 2)")
    rank_sync.agree(group, "graph", f"same{TOLD}x: strides (2, 1)", seconds=5)
    assert not rank_sync.is_at_odds(group)


def test_only_the_lines_that_differ_are_said(group_store: dist.HashStore, group: str) -> None:
    group_store.set("attn_compiler/0-1/1/1", f"compiles\nmethod: 'ring'\npacked: False{TOLD}x: int32")
    with pytest.raises(RanksDisagree) as caught:
        rank_sync.agree(group, "graph", f"compiles\nmethod: 'auto'\npacked: False{TOLD}x: int64", seconds=5)
    assert str(caught.value) == "rank 0: method: 'auto', x: int64; rank 1: method: 'ring', x: int32"
    assert rank_sync.is_at_odds(group)


def test_a_failure_is_not_held_against_what_a_call_is_given(group_store: dist.HashStore, group: str) -> None:
    group_store.set("attn_compiler/0-1/1/1", "could not compile: MemoryError")
    with pytest.raises(RanksDisagree, match=r"^rank 0: compiles; rank 1: could not compile: MemoryError$"):
        rank_sync.agree(group, "graph", f"compiles\nmethod: 'auto'{TOLD}x: int64", seconds=5)


def test_a_call_waits_for_the_others(group_store: dist.HashStore, group: str) -> None:
    timer = _later(group_store, "attn_compiler/0-1/0/runs/code")
    rank_sync.enter(group, "code", "runs")
    timer.join()
    group_store.add("attn_compiler/0-1/0/runs/code", 1)
    rank_sync.enter(group, "code", "runs")


def test_calls_leave_nothing_in_the_store(group_store: dist.HashStore, group: str) -> None:
    group_store.add("attn_compiler/0-1/0/runs/code", 50)
    rank_sync.enter(group, "code", "runs")
    before = group_store.num_keys()
    for _ in range(20):
        rank_sync.enter(group, "code", "runs")
    assert group_store.num_keys() == before


def test_a_rank_that_compiles_instead_ends_a_call(group_store: dist.HashStore, group: str) -> None:
    timer = _later(group_store, "attn_compiler/0-1/1/1", f"compiles{TOLD}x: int32")
    with pytest.raises(RanksDisagree, match="rank 0: runs, x: int64; rank 1: compiles, x: int32"):
        rank_sync.enter(group, "code", f"runs{TOLD}x: int64")
    timer.join()
    assert group_store.get("attn_compiler/0-1/1/0").decode() == f"runs{TOLD}x: int64"


def test_a_rank_that_runs_other_code_ends_a_call(group_store: dist.HashStore, group: str) -> None:
    group_store.set("attn_compiler/0-1/0/waits/1", "1 other")
    timer = _later(group_store, "attn_compiler/0-1/1/1", "runs other")
    with pytest.raises(RanksDisagree, match="rank 0: runs code; rank 1: runs other"):
        rank_sync.enter(group, "code", "runs code")
    timer.join()


def test_that_a_rank_waited_in_an_earlier_call_says_nothing(group_store: dist.HashStore, group: str) -> None:
    group_store.add("attn_compiler/0-1/0/runs/code", 1)
    rank_sync.enter(group, "code", "runs code")
    group_store.set("attn_compiler/0-1/0/waits/1", "1 other")
    timer = threading.Timer(0.5, lambda: group_store.add("attn_compiler/0-1/0/runs/code", 1))
    timer.start()
    rank_sync.enter(group, "code", "runs code")
    timer.join()


def test_a_call_waits_no_longer_than_the_store(group_store: dist.HashStore, group: str) -> None:
    group_store.set_timeout(datetime.timedelta(seconds=1))
    with pytest.raises(RanksDisagree, match="a rank did not come to this call"):
        rank_sync.enter(group, "code", "runs")


def test_groups_of_the_same_ranks_count_together(group_store: dist.HashStore, group: str) -> None:
    rank_sync.send(group, "one")
    other = str(dist.new_group([0, 1]).group_name)
    assert rank_sync.send(other, "two")[0] == "attn_compiler/0-1/2/0"


def test_another_store_is_begun_anew(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_sync.send(group, "one")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    assert rank_sync.send(group, "one")[0] == "attn_compiler/0-1/1/0"


def test_a_fake_group_has_nobody_to_meet(group: str) -> None:
    assert _is_fake(group)
    assert rank_sync.rank_of(group) == 0
    assert rank_sync.ranks_of(group) == {0, 1}
