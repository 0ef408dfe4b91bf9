from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import documentation
from benchmarks.documentation import HELD_OUT

_LONG = "A paragraph that is longer than a heading, and not to be read a second time."


def _package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_is_documented_comes_in_the_order_of_the_file(tmp_path: Path) -> None:
    source = '"""Of the module."""\nclass A:\n    """Of A."""\n    def f(self):\n        """Of f."""\n\ndef g():\n    """Of g."""\n'
    root = _package(tmp_path, {"a.py": source, "broken.py": "def (:"})
    assert documentation.documentation(root / "a.py") == ["Of the module.", "Of A.", "Of f.", "Of g."]
    assert documentation.documentation(root / "broken.py") == []


def test_files_come_in_one_order_and_tests_not_at_all(tmp_path: Path) -> None:
    root = _package(tmp_path, {"b.py": "", "a/z.py": "", "a/b.py": "", "tests/c.py": "", "a/test/d.py": ""})
    assert [str(path.relative_to(root)) for path in documentation.source_files(root)] == ["a/b.py", "a/z.py", "b.py"]


def test_a_paragraph_is_read_once_and_whole_files_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        f"m{i:02}.py": f'"""{_LONG}\n\nThe {i}. file says something else in its second paragraph."""\n'
        for i in range(HELD_OUT)
    }
    monkeypatch.setattr(documentation, "_root", {"one": _package(tmp_path, files)}.get)
    text = documentation.read(("one", "missing"))
    assert text.packages == ("one",)
    assert (text.learnt + text.held_out).count(_LONG.encode()) == 1
    assert f"The {HELD_OUT - 1}. file".encode() in text.held_out
    assert b"The 0. file" in text.learnt
    assert b"The 0. file" not in text.held_out
    assert text.held_out.count(b"file says") == 1


def test_what_python_ships_is_enough_for_a_short_run() -> None:
    text = documentation.read((documentation.STANDARD_LIBRARY,))
    assert len(text.learnt) > 1_000_000
    assert len(text.held_out) > 10_000
    assert len(text.digest) == 16


def test_a_text_is_saved_and_loaded(tmp_path: Path) -> None:
    assert documentation.main([str(tmp_path / "a.zip"), "--packages", "json"]) == 0
    text = documentation.load(tmp_path / "a.zip")
    assert text == documentation.read(("json",))
    assert text.packages == ("json",)
    assert len(text.learnt) > 1000
