"""Notes what a kernel would be launched with, in place of launching it. So a launch's own code says what to compile ahead (ahead.py).

Within `noting` every launch of the calling thread is noted. Bodies of leaf ops are called with stand-ins and know nothing of it:
launch.py asks here before it launches. Imports neither torch nor triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

#: (kernel, positional arguments, arguments by name), with options such as num_warps among the latter, for the current device
Note = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]

_NOTE: ContextVar[Note | None] = ContextVar("attn_compiler_note", default=None)

#: who notes launches here, or None: nothing is noted, and launches launch
noter: Callable[[], Note | None] = _NOTE.get


@contextlib.contextmanager
def noting(note: Note) -> Iterator[None]:
    """Within the block launches are told to `note`, and none happens."""
    token = _NOTE.set(note)
    try:
        yield
    finally:
        _NOTE.reset(token)
