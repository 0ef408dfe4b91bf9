"""The one switch of what tests put into PyTorch, Triton and Python so that they run in less time: TESTS_QUICK=0 leaves it out.

Tests, the forks and processes that they start, and the fuzzer install them here. With TESTS_QUICK=0 what runs is what users run, only
slower: noxfile.py does that on every torch that is supported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import one_stack, quick_inductor, quick_interpreter, quick_tracing

#: read once a process. Processes that tests start have the variable from them.
ON = os.environ.get("TESTS_QUICK", "1") != "0"


def install(*, interpreter: bool = False) -> None:
    """In this process: how graphs are traced, and how Triton's kernels are interpreted, for which Triton is imported."""
    if ON:
        if interpreter:
            quick_interpreter.install()
        quick_tracing.install()


def install_in_imported() -> None:
    """Into the modules of Dynamo and Inductor that are imported by now."""
    if ON:
        quick_tracing.say_nothing()
        quick_inductor.install()


def one_after_another(lock: Path) -> None:
    """Processes of one group compile in turns."""
    if ON:
        quick_inductor.one_after_another(lock)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """The function's value. No frame of what it calls waits for memory."""
    return one_stack.call(function, *args) if ON else function(*args)
