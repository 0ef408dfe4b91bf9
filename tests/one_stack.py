"""Python's frames get one piece of memory for a whole test. A fifth of the processor time of a compilation goes without it.

CPython keeps frames in pieces of 16 KiB. A call at the end of a piece maps the next one, and its return gives that one back: where
Dynamo's calls happen to go over such an end again and again, each of them waits for the system. A frame too large for a piece gets one of
its own, rounded up to a power of two, and the frames of what it calls take the rest of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: values on the stack of `call`'s frame: 5 MB, of 8 that are mapped. None of them is ever touched, so they take no memory.
_VALUES = 600_000


def call(function: Callable[..., Any], *args: Any) -> Any:
    """The function's value. What it calls has 3 MB for its frames, a few thousand of them, before the next piece."""
    return function(*args)


call.__code__ = call.__code__.replace(co_stacksize=_VALUES)
