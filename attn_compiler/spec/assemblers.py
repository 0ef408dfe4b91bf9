"""Choice of the assembler for our Hopper kernels of several products. No triton is imported.

Triton has `ptxas`, and beside it a newer `ptxas-blackwell`, which since 3.9 it uses for Hopper, too. If the older is known to be wrong,
Triton 3.6 to 3.8 are told to use the newer for our kernels, or that of NVIDIA's compiler package
(lowerings/shared/kernels/releases_assembler_sm90.py).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

Release = tuple[int, int]

#: The first CUDA release whose assembler is known to be right for several wgmma products with operands in registers on Hopper. Those of
#: 12.8 and 12.9 read shared memory outside of the kernel's, or reuse registers that are still read (triton #11366, PR 11781).
RIGHT_PTXAS: Release = (13, 1)

#: releases of Triton that can be told to use the newer one, and the first that uses it by itself
_TOLD: tuple[Release, ...] = ((3, 6), (3, 7), (3, 8))
_BY_ITSELF: Release = (3, 9)
_OLDER, _NEWER = "ptxas", "ptxas-blackwell"
#: how names of programs end
_EXE = sysconfig.get_config_var("EXE") or ""
#: an unknown release
_NONE: Release = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembler:
    """release: of CUDA, (0, 0) if unknown. program: its path if Triton uses another one by default, else ""."""

    release: Release
    program: str = ""

    @property
    def version(self) -> str:
        """For people: "13.1", or ""."""
        return "" if self.release == _NONE else ".".join(map(str, self.release))


@functools.cache
def hopper_assembler(triton: str) -> Assembler:
    """Return the assembler for Hopper, asked once a process. triton: the installed version."""
    release = _release_in(triton)
    if release >= _BY_ITSELF:
        return Assembler(release=_release_of(_NEWER))
    older = Assembler(release=_release_of(_OLDER))
    if older.release >= RIGHT_PTXAS or release not in _TOLD:
        return older
    # Drivers load code from assemblers of any CUDA release up to their own major number.
    newest = (_driver()[0] + 1, 0)
    found = (Assembler(release=_said_by(path), program=path) for path in (*_paths(_NEWER), *_installed()))
    return next((one for one in found if RIGHT_PTXAS <= one.release < newest), older)


def _release_of(program: str) -> Release:
    """Return the release of a program, found as Triton does."""
    return next((release for path in _paths(program) if (release := _said_by(path)) != _NONE), _NONE)


def _paths(program: str) -> list[str]:
    """Return where Triton looks for a program: a variable such as TRITON_PTXAS_PATH, then its own package."""
    package = importlib.util.find_spec("triton")
    named = os.environ.get(f"TRITON_{program.upper().replace('-', '_')}_PATH")
    own = [] if package is None or package.origin is None else [Path(package.origin).parent / "backends/nvidia/bin"]
    return [*([named] if named else []), *(f"{folder / program}{_EXE}" for folder in own)]


def _installed() -> list[str]:
    """Return where the package nvidia-cuda-nvcc has its assembler."""
    package = importlib.util.find_spec("nvidia")
    folders = None if package is None else package.submodule_search_locations
    return [f"{Path(folder) / 'cu13/bin' / _OLDER}{_EXE}" for folder in folders or ()]


def _said_by(path: str) -> Release:
    """Return the release that a program prints; (0, 0) if it can't be run or prints none."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return _NONE
    return _release_in(said.partition("release ")[2])


def _release_in(text: str) -> Release:
    found = re.match(r"(\d+)\.(\d+)", text)
    return _NONE if found is None else (int(found[1]), int(found[2]))


def _driver() -> Release:
    """Return the driver's CUDA release. Safe in a process that has not initialised a GPU."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return _NONE
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10
