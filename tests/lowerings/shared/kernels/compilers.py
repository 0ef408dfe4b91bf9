"""How tests compile kernels, and whose machine code is known: how many registers spill is a matter of Triton's release, and so is what
Gluon takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton

_ROOT = Path(__file__).parents[4]

#: releases that the bounds on spilled registers were found with
KNOWN = ("3.6", "3.7")

of_a_known_compiler = pytest.mark.skipif(
    not triton.__version__.startswith(KNOWN), reason=f"Triton {triton.__version__} spills other registers than {KNOWN}"
)


def printed_by(module: ModuleType) -> list[dict[str, Any]]:
    """What one of the modules that compile kernels says of them. In a process of its own, since Triton's interpreter compiles nothing: it
    was chosen for this one before Triton was imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module.__name__]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
