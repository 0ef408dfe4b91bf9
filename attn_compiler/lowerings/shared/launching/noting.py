"""Recording of launches in place of launching: the launch's own code says which kernels to compile ahead (ahead.py).

Within `noting` every launch of the calling thread is recorded. Bodies of leaf ops run with stand-ins and need no change: launch.py checks
here before it launches. Imports neither torch nor triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

#: (kernel, positional arguments, arguments by name), with options such as num_warps among the latter, for the current device
Note = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]

_NOTE: ContextVar[Note | None] = ContextVar("attn_compiler_note", default=None)

#: returns the function that records launches in this context, or None: launches run
noter: Callable[[], Note | None] = _NOTE.get


@contextlib.contextmanager
def noting(note: Note) -> Iterator[None]:
    """Pass launches to `note` within the block, instead of running them."""
    token = _NOTE.set(note)
    try:
        yield
    finally:
        _NOTE.reset(token)
