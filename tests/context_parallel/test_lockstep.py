"""Compiled code meets the other ranks before it runs, and a rank that can't compile tells them."""

from __future__ import annotations

import pytest

from attn_compiler import ContextParallel
from attn_compiler.context_parallel import lockstep
from attn_compiler.context_parallel.lockstep import Meeting
from attn_compiler.options.options import Options
from attn_compiler.reasons.errors import ContextParallelUnsupported
from attn_compiler.torch_private import rank_sync
from attn_compiler.torch_private.rank_sync import RanksDisagree
from tests.meshes import fake_mesh

_MEETING = Meeting(group="0", code="abc", told="runs")


@pytest.fixture(autouse=True)
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sync, "is_fake", lambda _: False)


def test_each_call_meets_every_group_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(rank_sync, "enter", lambda group, code, told: done.append(f"{group} {code} {told}"))
    other = Meeting(group="1", code="def", told="runs too")
    call = lockstep.in_step(lambda x: done.append(x), [_MEETING, other])
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
        lockstep.in_step(compiled, [_MEETING])()


def test_code_without_meetings_is_what_it_was() -> None:
    assert lockstep.in_step(len, []) is len


def test_a_fake_group_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sync, "is_fake", lambda _: True)
    assert lockstep.in_step(len, [_MEETING]) is len


def _told(monkeypatch: pytest.MonkeyPatch, error: Exception, *, at_odds: bool = False, size: int = 2) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(rank_sync, "is_at_odds", lambda _: at_odds)
    monkeypatch.setattr(rank_sync, "send", lambda _, text: said.append(text))
    with fake_mesh(size) as mesh:
        options = Options(context_parallel=ContextParallel(mesh))
        telling = lockstep.telling_of_failure(options.sequence_group, lambda found: isinstance(found, KeyError))
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
