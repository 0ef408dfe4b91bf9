"""Which of a kernel's reads and writes of shared memory the asynchronous proxy may not know of yet, for `gluon_in_torch`.

Threads read and write shared memory by the generic proxy, the copy engine and the tensor cores by the asynchronous one. A barrier alone
does not order the two: between an access of one kind and one of the other that it must come before, the thread of the first one has a fence
(https://docs.nvidia.com/cuda/parallel-thread-execution/#async-proxy).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torch import Tensor


class Unfenced(RuntimeError):
    """The asynchronous proxy touches what a thread has touched, with no fence between."""


@dataclass(frozen=True, kw_only=True)
class _Access:
    """first, last: addresses of bytes."""

    first: int
    last: int
    writes: bool


@dataclass(frozen=True)
class Proxies:
    """Accesses by threads that have had no fence since."""

    by_thread: dict[int, list[_Access]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def touch(self, memory: Tensor, *, writes: bool) -> None:
        """This thread reads or writes it."""
        first, last = _reach(memory)
        with self.lock:
            self.by_thread.setdefault(threading.get_ident(), []).append(_Access(first=first, last=last, writes=writes))

    def fence(self) -> None:
        """This thread's accesses are known."""
        with self.lock:
            self.by_thread.pop(threading.get_ident(), None)

    def check(self, memory: Tensor, *, writes: bool) -> None:
        """The asynchronous proxy reads or writes it. Raises `Unfenced`."""
        first, last = _reach(memory)
        with self.lock:
            for access in (each for accesses in self.by_thread.values() for each in accesses):
                if access.first <= last and first <= access.last and (writes or access.writes):
                    before, now = ("written" if which else "read" for which in (access.writes, writes))
                    raise Unfenced(f"{now} by the asynchronous proxy, {before} by a thread without a fence since")


def _reach(memory: Tensor) -> tuple[int, int]:
    """The first and the last address of a view."""
    last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
    return memory.data_ptr(), memory.data_ptr() + (last + 1) * memory.element_size() - 1
