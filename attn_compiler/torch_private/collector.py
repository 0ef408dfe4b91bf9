"""Python's cyclic collector, which looks through all that a process has loaded: 0.2 to 0.3 s each time, beside transformers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within the block nothing is collected. For what is short, and makes what is needed to its end and beyond."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
