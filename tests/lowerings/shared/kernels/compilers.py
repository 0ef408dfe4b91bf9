"""How tests compile kernels, and whose machine code is known: how many registers spill is a matter of Triton's release, and so is what
Gluon takes."""

from __future__ import annotations

import json
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


def printed_by(module: ModuleType, *names: str, **variables: str) -> list[dict[str, Any]]:
    """What one of the modules that compile kernels says of them, or of those that are named. In a process of its own: Triton's interpreter
    compiles nothing, and was chosen for this one before Triton was imported."""
    code = f"import runpy; runpy.run_module({module.__name__!r}, run_name='__main__', alter_sys=True)"
    # With variables in a real one: torch reads them when it is imported.
    done = (fresh.run_anew if variables else fresh.run)(code, *names, environment=variables, of=fresh.KERNELS)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
