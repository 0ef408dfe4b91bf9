"""Which of Triton's assemblers makes our kernels of several products for Hopper. No triton is imported.

Triton has `ptxas`, and beside it a newer `ptxas-blackwell`, which since 3.9 it takes for Hopper, too. Where the older is known to be wrong,
Triton 3.6 to 3.8 are told to take the newer for our kernels (lowerings/shared/kernels/releases_assembler_sm90.py).
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

#: Of CUDA, the first assembler that is known to compile several products of wgmma with operands in registers rightly for Hopper. Those of
#: 12.8 and 12.9 read shared memory that is not the kernel's, or reuse registers that are still read (triton #11366, PR 11781).
RIGHT_PTXAS: Release = (13, 1)

#: releases of Triton that can be told to take the newer one, and the first that takes it by itself
_TOLD: tuple[Release, ...] = ((3, 6), (3, 7), (3, 8))
_BY_ITSELF: Release = (3, 9)
_OLDER, _NEWER = "ptxas", "ptxas-blackwell"
#: what nothing is known of
_NONE: Release = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembler:
    """release: of CUDA, (0, 0) where it can't be asked. is_told: Triton takes another by itself."""

    release: Release
    is_told: bool = False

    @property
    def version(self) -> str:
        """For people: "13.1", or ""."""
        return "" if self.release == _NONE else ".".join(map(str, self.release))


@functools.cache
def hopper_assembler(triton: str) -> Assembler:
    """Asked once a process. triton: the version that is installed."""
    release = _release_in(triton)
    if release >= _BY_ITSELF:
        return Assembler(release=_release_of(_NEWER))
    older = Assembler(release=_release_of(_OLDER))
    if older.release >= RIGHT_PTXAS or release not in _TOLD:
        return older
    newer = Assembler(release=_release_of(_NEWER), is_told=True)
    # Drivers load what the assembler of any CUDA of their major number makes, or of an earlier one.
    return newer if newer.release >= RIGHT_PTXAS and newer.release[0] <= _driver()[0] else older


def _release_of(program: str) -> Release:
    """Of the program that a variable of Triton names, such as TRITON_PTXAS_PATH, or else of Triton's own, as Triton takes them."""
    package = importlib.util.find_spec("triton")
    named = os.environ.get(f"TRITON_{program.upper().replace('-', '_')}_PATH")
    paths = [named] if named else []
    if package is not None and package.origin is not None:
        file = f"{program}{sysconfig.get_config_var('EXE') or ''}"
        paths.append(str(Path(package.origin).parent / "backends/nvidia/bin" / file))
    return next((release for path in paths if (release := _said_by(path)) != _NONE), _NONE)


def _said_by(path: str) -> Release:
    """(0, 0) of what can't be run, and of what says no release."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return _NONE
    return _release_in(said.partition("release ")[2])


def _release_in(text: str) -> Release:
    """The version that a text begins with."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return _NONE if found is None else (int(found[1]), int(found[2]))


def _driver() -> Release:
    """The CUDA that the driver knows. A process that has not asked for a GPU may ask this."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return _NONE
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10
