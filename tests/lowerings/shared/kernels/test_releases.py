"""What differs between releases of Triton, as kernels see it: in the interpreter here, and compiled in tests/lowerings/**/kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import attn_compiler.lowerings as lowerings
from attn_compiler.lowerings.shared.kernels.releases import members, of_tile
from tests.lowerings.shared.kernels import compiling_releases
from tests.lowerings.shared.kernels.compilers import printed_by

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
