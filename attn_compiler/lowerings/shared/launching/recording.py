"""Launches handed to whoever takes a leaf op apart (packaged_ops.py), instead of launched. Sizes may be symbolic then.

Within `recording` every launch of the calling thread is handed over. Bodies of leaf ops know nothing of it: they are called with the
values of a trace, and launching.py asks here before it launches. Imports neither torch nor triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol


class Recorder(Protocol):
    def allocated(self, tensor: Any) -> None:
        """A body made room for what its kernels write."""

    def launched(self, kernel: Any, tensors: Mapping[str, Any], arguments: Any) -> None:
        """A body would launch a kernel. tensors: of the call, by name. arguments: `launching.Arguments`."""


_RECORDER: ContextVar[Recorder | None] = ContextVar("attn_compiler_recorder", default=None)

#: who takes launches here, or None: launches launch
recorder: Callable[[], Recorder | None] = _RECORDER.get


@contextlib.contextmanager
def recording(by: Recorder) -> Iterator[None]:
    """Within the block launches are handed to `by`, and none happens."""
    token = _RECORDER.set(by)
    try:
        yield
    finally:
        _RECORDER.reset(token)
