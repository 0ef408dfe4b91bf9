"""How tests compile kernels, and whose machine code is known: how many registers spill is a matter of Triton's release, and so is what
Gluon takes."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton

from tests import fresh

#: releases that the bounds on spilled registers were found with
KNOWN = ("3.6", "3.7", "3.8", "3.9")

of_a_known_compiler = pytest.mark.skipif(
    not triton.__version__.startswith(KNOWN), reason=f"Triton {triton.__version__} spills other registers than {KNOWN}"
)

_BOUNDS = Path(__file__).with_name("bounds_by_release.csv")


def most_spilled(usual: int, name: str) -> int:
    """Bytes of a thread's stack: `usual`, or what bounds_by_release.csv says of a kernel, by its name there, with the installed Triton."""
    return max(usual, _of_release(".".join(triton.__version__.split(".")[:2])).get(name, 0))


@functools.cache
def _of_release(release: str) -> dict[str, int]:
    with _BOUNDS.open(encoding="utf-8", newline="") as file:
        return {row["kernel"]: int(row["spilled"]) for row in csv.DictReader(file) if row["triton"] == release}


def printed_by(module: ModuleType, *names: str, **variables: str) -> list[dict[str, Any]]:
    """What one of the modules that compile kernels says of them, or of those that are named. In a process of its own: Triton's interpreter
    compiles nothing, and was chosen for this one before Triton was imported."""
    code = f"import runpy; runpy.run_module({module.__name__!r}, run_name='__main__', alter_sys=True)"
    # With variables in a real one: torch reads them when it is imported.
    done = (fresh.run_anew if variables else fresh.run)(code, *names, environment=variables, of=fresh.KERNELS)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
