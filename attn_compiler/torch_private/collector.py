"""Python's cyclic collector, which looks through all that a process has loaded: 0.2 to 0.3 s each time, beside transformers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: objects that are made, and not freed, between two collections of young ones; Python's own number is 700 or 2,000
_MANY = 50_000


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


@contextlib.contextmanager
def rarely() -> Iterator[None]:
    """Within the block 50,000 new objects make the collector look at young ones, where it is on. For what takes seconds, and makes much
    that stays.

    A collection of everything comes a hundred times as rarely, so what is garbage by then is bounded. Threads that are within one block
    each leave the setting to the first. What others set meanwhile stays.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _MANY:
        yield
        return
    ours = (_MANY, *before[1:])
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*before)
