"""Launches that are recorded in place of being run. Bodies of leaf ops need no change: launch.py checks here before it launches.

Within `noting` launches are passed to a function that compiles their kernels ahead (ahead.py); tensors are stand-ins. Within `recording`
they are passed to a tracer that decomposes a leaf op (packaged_ops.py); sizes may be symbolic. Both hold for the calling thread. Imports
neither torch nor triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

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


class Recorder(Protocol):
    def allocated(self, tensor: Any) -> None:
        """Record a tensor that a body allocated for its kernels' results."""

    def launched(self, kernel: Any, tensors: Mapping[str, Any], arguments: Any) -> None:
        """Record a launch. tensors: of the call, by name. arguments: `launch.Arguments`."""


_RECORDER: ContextVar[Recorder | None] = ContextVar("attn_compiler_recorder", default=None)

#: returns the recorder of launches in this context, or None: launches run
recorder: Callable[[], Recorder | None] = _RECORDER.get


@contextlib.contextmanager
def recording(by: Recorder) -> Iterator[None]:
    """Pass launches to `by` within the block, instead of running them."""
    token = _RECORDER.set(by)
    try:
        yield
    finally:
        _RECORDER.reset(token)
