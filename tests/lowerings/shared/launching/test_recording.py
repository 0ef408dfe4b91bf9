"""Launches are handed over where somebody takes them, and in no other thread; what a body allocates is told, too."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.shared.launching.launch import Arguments, launch
from attn_compiler.lowerings.shared.launching.recording import recorder, recording
from attn_compiler.lowerings.shared.launching.replaying import Alike, alike


class _Taker:
    def __init__(self) -> None:
        self.made: list[Any] = []
        self.taken: list[tuple[Any, Any]] = []

    def allocated(self, tensor: Any) -> None:
        self.made.append(tensor)

    def launched(self, kernel: Any, tensors: Mapping[str, Any], arguments: Any) -> None:
        self.taken.append((kernel, arguments))


def test_nobody_takes_launches_outside_of_the_block() -> None:
    taker = _Taker()
    assert recorder() is None
    with recording(taker):
        assert recorder() is taker
    assert recorder() is None
    with pytest.raises(ValueError, match="inner"), recording(taker):
        raise ValueError("inner")
    assert recorder() is None


def test_other_threads_launch() -> None:
    found: list[Any] = []
    with recording(_Taker()):
        thread = threading.Thread(target=lambda: found.append(recorder()))
        thread.start()
        thread.join()
    assert found == [None]


def test_a_launch_is_handed_over_and_nothing_is_kept() -> None:
    taker, same = _Taker(), Alike(device=torch.device("cpu"))
    arguments = Arguments(grid=(1, 1, 1), tensors={"X": "x"}, numbers={})
    kernel = object()
    with recording(taker):
        made = same.empty("x", lambda: torch.empty(2))
        assert launch(kernel, same, {"x": made}, lambda: arguments) is None
    assert taker.made == [made]
    assert taker.taken == [(kernel, arguments)]
    assert (same.launches, same.empties) == ({}, {})


def test_calls_that_are_recorded_know_nothing_of_others() -> None:
    tensors = [torch.empty(3)]
    known = alike("recorded", "", tensors)
    assert alike("recorded", "", tensors) is known
    with recording(_Taker()):
        assert alike("recorded", "", tensors) is not known
    assert alike("recorded", "", tensors) is known
