"""What differs between releases of Triton and of Gluon, and kernels that are assembled by the newer program."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import compiler
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import is_builtin

import attn_compiler.lowerings as lowerings
from attn_compiler.lowerings.shared.kernels import releases_sm90
from attn_compiler.lowerings.shared.kernels.releases import members, of_tile
from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_jit, by_newer
from tests.lowerings.shared.kernels import assembling, compiling_releases
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by

pytest.importorskip("triton")

# What differs between releases of Triton, as kernels see it.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class How(NamedTuple):
    SIZE: Any
    TWICE: Any


@triton.jit
def _first(Out, first, last, HOW: tl.constexpr):
    how: tl.constexpr = members(HOW)
    positions = tl.arange(0, how.SIZE)
    inside = (positions < how.SIZE // 2) & of_tile(first <= last)
    ones = tl.load(Out + positions, mask=inside, other=1.0)
    if how.TWICE:
        ones = ones * 2
    tl.store(Out + positions, ones + 5, mask=inside)


@pytest.mark.parametrize(("last", "twice"), [(3, True), (3, False), (2, True)])
def test_constants_and_conditions(last: int, twice: bool) -> None:
    out = torch.ones(16, device=DEVICE)
    _first[(1,)](out, 3, last, HOW=How(SIZE=16, TWICE=twice))
    expected = torch.ones(16)
    if last >= 3:
        expected[:8] = 7 if twice else 6
    assert torch.equal(out.cpu(), expected)


def test_compiled_members_are_constants() -> None:
    """What a kernel takes, and what it hands on, by both ways in which Triton keeps a tuple of constants."""
    (found,) = printed_by(compiling_releases)
    assert found == {"tiles": [64, 64], "handed": [64, 64]}


def test_no_kernel_asks_for_a_release() -> None:
    kernels = [
        path
        for path in Path(str(lowerings.__file__)).parent.rglob("kernels/*.py")
        if not path.stem.startswith("releases")
    ]
    assert len(kernels) > 30
    said = ("triton.__version__", "._replace()", "async_copy_", "_reinterpret(", "thread_barrier")
    assert [(path.name, word) for path in kernels for word in said if word in path.read_text()] == []


# What differs between Gluon's releases.
@pytest.mark.parametrize("name", ["barrier_of_threads", "async_load", "async_store", "reinterpret", "add_from_shared"])
def test_gluon_takes_each(name: str) -> None:
    assert is_builtin(getattr(releases_sm90, name))


def test_they_are_those_of_the_release() -> None:
    assert releases_sm90.async_load in (getattr(tma, "async_load", None), tma.async_copy_global_to_shared)
    assert releases_sm90.async_store in (getattr(tma, "async_store", None), tma.async_copy_shared_to_global)
    assert releases_sm90.barrier_of_threads in (getattr(gl, name, None) for name in ("barrier", "thread_barrier"))
    assert hasattr(shared_memory_descriptor, releases_sm90._REINTERPRET)


# Kernels that are told to are assembled by Triton's newer program.
@of_a_known_compiler
def test_kernels_are_assembled_by_the_program_that_is_told() -> None:
    said, without, told, again = printed_by(assembling)
    # Programs before CUDA 13 do not put their names into what they make.
    newer = said["programs"]["ptxas-blackwell"] if said["programs"]["ptxas-blackwell"] >= "13" else ""
    assert told["ours"] == newer
    assert told["others"] == without["others"]
    assert told["launched"]
    assert without["launched"]
    for name in ("keys", "hashes"):
        (ours, others), (ours_told, others_told) = without[name], told[name]
        assert ours != ours_told
        assert others == others_told
    assert again == without


def test_what_is_interpreted_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    kernel = assembled_jit(do_not_specialize=["length"])(test_what_is_interpreted_stays_so)
    assert type(kernel) is type(triton.jit(test_what_is_interpreted_stays_so))


def test_a_compiler_that_can_not_be_told_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that somebody put in the place of Triton's."""

    def other(src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> str:
        return "assembled by whatever"

    monkeypatch.setattr(compiler, "compile", other)
    with pytest.raises(RuntimeError, match="did not take the assembler"):
        by_newer("source", target=SimpleNamespace())
