"""Capture of calls of models' linear attention functions, in code compiled for this backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_compiler.compiling.attempts import StepFailed, options_of, step
from attn_compiler.torch_private import substitution


def watch(backend: Callable[..., Any]) -> None:
    """Look at models' modules when a compilation begins. backend: one of ours, whose compilations capture the calls."""
    substitution.take_for(backend)
    substitution.watch_starts(_look)


def _look() -> None:
    backend, given = substitution.compiling_for()
    if backend is None or not substitution.are_taken_for(backend):
        return
    # Imported at the first compilation of ours, so that naming the backend stays cheap.
    try:
        from attn_compiler.passes.matching.linear import looking
    except (ImportError, AttributeError):
        # The backend imports the same: it reports the failure and goes on without us.
        return
    try:
        with step("look for functions of linear attention"):
            for function in looking.new_functions():
                from attn_compiler.passes.matching.linear import substitutes

                substitutes.propose(function)
    except StepFailed as failed:
        failed.warn(options_of(given), "any", "those that were not looked at stay the model's own")
