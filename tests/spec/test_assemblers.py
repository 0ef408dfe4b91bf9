"""Our kernels are assembled for Hopper by a program that is known to be right, where Triton has one that the driver knows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from attn_compiler.spec import assemblers
from attn_compiler.spec.assemblers import Assembler, hopper_assembler

Says = Callable[[str, str], None]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Have a program, of Triton as variables name it or of a package, be of a release."""
    package = SimpleNamespace(submodule_search_locations=[tmp_path / "nvidia"])
    monkeypatch.setattr(assemblers.importlib.util, "find_spec", {"triton": None, "nvidia": package}.get)

    def say(program: str, release: str) -> None:
        file = tmp_path / program
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.80\n")
        file.chmod(0o755)
        monkeypatch.setenv(f"TRITON_{program}_PATH", str(file))

    return say


@pytest.fixture(autouse=True)
def nothing_is_kept() -> None:
    hopper_assembler.cache_clear()


# packaged: of the package nvidia-cuda-nvcc. taken: the file of the program, if Triton takes another one by default.
@pytest.mark.parametrize(
    ("triton", "older", "newer", "packaged", "driver", "expected", "taken"),
    [
        ("3.7.1", "12.8", "13.1", "", (13, 0), (13, 1), "PTXAS_BLACKWELL"),
        ("3.6.0+git12", "12.8", "13.1", "", (13, 2), (13, 1), "PTXAS_BLACKWELL"),
        ("3.8.0", "12.9", "13.3", "13.1", (14, 0), (13, 3), "PTXAS_BLACKWELL"),
        # A driver of CUDA 12 knows nothing that an assembler of CUDA 13 makes.
        ("3.7.1", "12.8", "13.1", "13.1", (12, 9), (12, 8), ""),
        ("3.7.1", "12.8", "13.1", "", (0, 0), (12, 8), ""),
        ("3.7.1", "12.8", "14.0", "", (13, 0), (12, 8), ""),
        ("3.7.1", "12.8", "14.0", "13.2", (13, 0), (13, 2), "ptxas"),
        # What Triton 3.6 brings is wrong, too.
        ("3.6.0", "12.8", "12.9", "", (13, 0), (12, 8), ""),
        ("3.6.0", "12.8", "12.9", "13.1", (13, 0), (13, 1), "ptxas"),
        ("3.6.0", "13.0", "12.9", "13.0", (13, 0), (13, 0), ""),
        ("3.7.1", "12.8", "13.0", "", (13, 0), (12, 8), ""),
        # Triton takes the right one by itself: the user named it, or it is 3.9.
        ("3.7.1", "13.1", "13.3", "13.4", (13, 0), (13, 1), ""),
        ("3.9.0", "12.9", "13.4", "13.1", (12, 8), (13, 4), ""),
        ("3.9.0", "13.4", "12.9", "13.1", (13, 0), (12, 9), ""),
        ("4.0.0", "12.9", "13.4", "", (13, 0), (13, 4), ""),
        # of others nothing is known
        ("3.5.0", "12.8", "13.1", "13.1", (13, 0), (12, 8), ""),
        ("", "12.8", "13.1", "13.1", (13, 0), (12, 8), ""),
    ],
)
def test_which_it_is(
    triton: str,
    older: str,
    newer: str,
    packaged: str,
    driver: tuple[int, int],
    expected: tuple[int, int],
    taken: str,
    says: Says,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says("PTXAS", older)
    says("PTXAS_BLACKWELL", newer)
    if packaged:
        says("nvidia/cu13/bin/ptxas", packaged)
    monkeypatch.setattr(assemblers, "_driver", lambda: driver)
    found = hopper_assembler(triton)
    assert (found.release, Path(found.program).name) == (expected, taken)


def test_a_program_that_is_not_there_leaves_tritons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    own = assemblers._release_of("ptxas")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "absent"))
    assert assemblers._release_of("ptxas") == own
    monkeypatch.setattr(assemblers.importlib.util, "find_spec", lambda name: None)
    assert assemblers._release_of("ptxas") == (0, 0)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("#!/bin/sh\necho release 13.4\n", 0o644),
        ("#!/not/there\n", 0o755),
        ("no program", 0o755),
        ("#!/bin/sh\nexit 3\n", 0o755),
        ("#!/bin/sh\nprintf '\\377'\n", 0o755),
    ],
    ids=["not to be run", "no interpreter", "no program", "fails", "no text"],
)
def test_a_program_that_says_nothing_leaves_tritons_own(
    text: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    own = assemblers._release_of("ptxas")
    file = tmp_path / "ptxas"
    file.write_text(text)
    file.chmod(mode)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(file))
    assert assemblers._release_of("ptxas") == own


def test_words() -> None:
    assert (Assembler(release=(13, 1)).version, Assembler(release=(0, 0)).version) == ("13.1", "")


@pytest.mark.parametrize(("version", "release"), [(13010, (13, 1)), (12080, (12, 8)), (13000, (13, 0))])
def test_the_driver_is_asked(version: int, release: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def get(pointer: object) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = version  # type: ignore[arg-type]
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get))
    assert assemblers._driver() == release


def test_there_may_be_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert assemblers._driver() == (0, 0)
