"""No call waits for memory of its frame, however deep it is."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable

import pytest

from tests import one_stack

_DEPTH = 400
_CALLS = 100


def _small() -> None:
    """Takes a frame, and gives it back."""


def _faults() -> int:
    """Pages that had to be found for calls at one depth: the most of all depths."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_CALLS):
        _small()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _most(depth: int = 0) -> int:
    return max(_faults(), _most(depth + 1)) if depth < _DEPTH else _faults()


def _in_a_thread(function: Callable[[], int]) -> int:
    """A thread has a stack of frames of its own, which begins with a small piece."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_calls_at_no_depth_wait_for_memory() -> None:
    assert _in_a_thread(_most) >= _CALLS
    assert _in_a_thread(lambda: one_stack.call(_most)) < _CALLS / 2


def test_what_is_called_is_given_its_arguments_and_may_fail() -> None:
    assert one_stack.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        one_stack.call(divmod, 7, 0)
