"""Kernels that are told to are assembled by Triton's newer program; those of others are not, and caches tell them apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.compiler import compiler

from attn_compiler.lowerings.shared.kernels.releases_assembler_sm90 import assembled_jit, by_newer
from tests.lowerings.shared.kernels import assembling
from tests.lowerings.shared.kernels.compilers import of_a_known_compiler, printed_by


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
