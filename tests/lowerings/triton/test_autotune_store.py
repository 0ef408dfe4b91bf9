from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from attn_compiler.lowerings.triton.autotune_store import TileStore


def test_what_was_put_is_found_by_another_store(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    assert TileStore(folder=folder).get("a") is None
    TileStore(folder=folder).put("a", {"x": [1.5, 2]})
    TileStore(folder=folder).put("b", 3)
    assert TileStore(folder=folder).get("a") == {"x": [1.5, 2]}
    assert sorted(p.name for p in folder.iterdir()) == ["a.json", "b.json"]


@pytest.mark.parametrize("content", [b"", b'{"x": ', b"\xff\xfe"])
def test_a_broken_file_is_none(tmp_path: Path, content: bytes) -> None:
    store = TileStore(folder=tmp_path)
    store.path("a").write_bytes(content)
    assert store.get("a") is None
    store.put("a", 1)
    assert store.get("a") == 1


def test_a_folder_that_cannot_be_written_is_told_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        TileStore(folder=tmp_path / "file").put("a", 1)
    assert "measured again" in caplog.text
    assert TileStore(folder=tmp_path / "file").get("a") is None


def test_what_is_no_json_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        TileStore(folder=tmp_path).put("a", object())
    assert list(tmp_path.iterdir()) == []


def test_readers_find_all_or_nothing_while_others_write(tmp_path: Path) -> None:
    store = TileStore(folder=tmp_path)
    values = [{"who": who, "much": [who] * 5000} for who in range(4)]
    threads = [threading.Thread(target=lambda v=v: [store.put("a", v) for _ in range(20)]) for v in values]
    for thread in threads:
        thread.start()
    seen = [store.get("a") for _ in range(100)]
    for thread in threads:
        thread.join()
    assert all(value is None or value in values for value in seen)
    assert json.loads(store.path("a").read_text()) in values
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
