from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from attn_compiler.torch_private import store
from attn_compiler.torch_private.store import FOLDER, Store


def test_what_was_put_comes_back_and_nothing_else(tmp_path: Path) -> None:
    one = Store(root=tmp_path)
    assert one.get("a") is None
    one.put("a", {"x": [1, "ü", None]})
    assert one.get("a") == {"x": [1, "ü", None]}
    assert one.get("b") is None
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["a.json"]


def test_a_file_under_another_name_is_missing(tmp_path: Path) -> None:
    one = Store(root=tmp_path)
    one.put("a", 1)
    one.path("a").rename(one.path("b"))
    assert one.get("b") is None


def test_readers_find_all_or_nothing_while_others_write(tmp_path: Path) -> None:
    one, long = Store(root=tmp_path), ["x" * 1000] * 500
    wrong: list[object] = []

    def write() -> None:
        for _ in range(20):
            one.put("a", long)

    def read() -> None:
        for _ in range(100):
            found = one.get("a")
            if found not in (None, long):
                wrong.append(found)

    threads = [threading.Thread(target=work) for work in (write, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert one.get("a") == long
    assert len(list(one.folder.iterdir())) == 1


def test_the_files_that_nobody_used_for_longest_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "_MOST_FILES", 8)
    one = Store(root=tmp_path)
    for number in range(8):
        one.put(f"{number}", number)
        os.utime(one.path(f"{number}"), (number, number))
    assert one.get("0") == 0
    one.put("8", 8)
    left = {path.stem for path in one.folder.iterdir()}
    assert left == {"0", "4", "5", "6", "7", "8"}


def test_what_a_process_that_was_ended_left_goes_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "_MOST_FILES", 1)
    one = Store(root=tmp_path)
    one.put("a", 1)
    for name in ("old.tmp", "new.tmp"):
        (one.folder / name).write_text("half of a")
    os.utime(one.folder / "old.tmp", (1, 1))
    one.put("b", 2)
    assert {path.name for path in one.folder.glob("*.tmp")} == {"new.tmp"}


def test_others_may_read_what_the_user_lets_them_read(tmp_path: Path) -> None:
    one, like = Store(root=tmp_path), tmp_path / "like"
    one.put("a", 1)
    like.write_text("")
    assert one.path("a").stat().st_mode == like.stat().st_mode


def test_a_place_that_can_not_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "attn_compiler").write_text("in the way")
    one = Store(root=tmp_path)
    one.put("a", 1)
    assert one.get("a") is None
    assert (tmp_path / "attn_compiler").read_text() == "in the way"
