"""Launches are noted where somebody notes them, and in no other thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from attn_compiler.lowerings.shared.launching.noting import noter, noting


def test_nobody_notes_outside_of_the_block() -> None:
    def note(kernel: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None: ...

    assert noter() is None
    with noting(note):
        assert noter() is note
    assert noter() is None


def test_the_one_outside_notes_again_when_the_inner_block_is_left_by_an_exception() -> None:
    found: list[str] = []
    with noting(lambda *_: found.append("outer")):
        with pytest.raises(ValueError, match="inner"), noting(lambda *_: found.append("inner")):
            raise ValueError("inner")
        note = noter()
        assert note is not None
        note(None, (), {})
    assert found == ["outer"]


def test_other_threads_launch() -> None:
    found: list[Any] = []
    with noting(lambda *_: None):
        thread = threading.Thread(target=lambda: found.append(noter()))
        thread.start()
        thread.join()
    assert found == [None]
