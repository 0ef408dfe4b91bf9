"""A C++ compiler that links: AOTInductor's packages are libraries, and a machine's first compiler may compile and not link."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: asked after the one that CXX names
OTHERS = ("g++", "/usr/bin/g++", "clang++")
#: The C++ library is asked for by the compiler itself, also for a line that needs nothing of it.
_SOURCE = 'extern "C" int size() { return 1; }\n'


@functools.cache
def compiler() -> str | None:
    """The first one that makes a library; None: none does."""
    asked = (os.environ.get("CXX"), *OTHERS)
    return next((name for name in asked if name and shutil.which(name) and links(name)), None)


@functools.cache
def links(name: str, *flags: str) -> bool:
    """Whether a compiler makes a library of a line of C++, given these flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "line.cpp"
        source.write_text(_SOURCE)
        command = [name, "-shared", "-fPIC", *flags, "-o", str(Path(folder) / "line.so"), str(source)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def settings() -> Mapping[str, Any]:
    """Inductor's, for packages: that compiler, if there is one."""
    found = compiler()
    return {} if found is None else {"cpp.cxx": (None, found)}
