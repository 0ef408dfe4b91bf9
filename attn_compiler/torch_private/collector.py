"""Control of Python's cyclic garbage collector, which walks all loaded objects: 0.2 to 0.3 s each time, beside transformers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: new objects between two young collections; Python's default is 700 or 2,000
_MANY = 50_000


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Disable collection within the block. For short blocks whose objects live on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def rarely() -> Iterator[None]:
    """Collect young objects only after 50,000 new ones within the block. For blocks of seconds whose objects mostly live on.

    A full collection comes a hundred times as rarely, so garbage is bounded. Of threads within the block, only the first changes it.
    Settings made by others meanwhile stay.
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
