"""Launches passed to a tracer that decomposes a leaf op (packaged_ops.py), instead of being run. Sizes may be symbolic then.

Within `recording` every launch of the calling thread is passed on. Bodies of leaf ops need no change: they run on the values of a trace,
and launch.py checks here before it launches. Imports neither torch nor triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol


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
