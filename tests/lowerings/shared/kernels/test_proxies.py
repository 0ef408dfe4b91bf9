"""The fences that kernels need are asked for: each sort of access without one is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.lowerings.shared.kernels.proxies import Proxies, Unfenced


def _elsewhere(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("by_thread", "asynchronously", "said"),
    [(False, True, "written by .*, read by"), (True, False, "read by .*, written by"), (True, True, "written by .*, written by")],
)  # fmt: skip
def test_a_fence_is_needed_unless_both_read(by_thread: bool, asynchronously: bool, said: str) -> None:
    proxies, memory = Proxies(), torch.zeros(4, 8)
    proxies.touch(memory, writes=by_thread)
    with pytest.raises(Unfenced, match=said):
        proxies.check(memory[3], writes=asynchronously)
    proxies.fence()
    proxies.check(memory[3], writes=asynchronously)


def test_both_may_read() -> None:
    proxies, memory = Proxies(), torch.zeros(4)
    proxies.touch(memory, writes=False)
    proxies.check(memory, writes=False)


def test_other_memory_needs_none() -> None:
    proxies, memory = Proxies(), torch.zeros(4, 8)
    proxies.touch(memory[1], writes=True)
    proxies.check(memory[0], writes=True)
    proxies.check(memory[2], writes=True)


def test_a_fence_is_of_one_thread() -> None:
    proxies, memory = Proxies(), torch.zeros(4)
    proxies.touch(memory, writes=False)
    _elsewhere(proxies.fence)
    with pytest.raises(Unfenced):
        proxies.check(memory, writes=True)
