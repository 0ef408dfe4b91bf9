"""The interpreter that tests run kernels in leaves triton.language as it found it, and answers as the one that it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from torch import Tensor

from tests import fresh, quick, quick_interpreter

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here"),
    pytest.mark.skipif(not quick.ON, reason="Triton's interpreter is left as it is"),
]


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(x: Any, scale: Any) -> Any:
    return tl.where(x > 0, x * scale, x.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(given: Any, wanted: Any, count: Any, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    square = at[:, None] * SIZE + at[None, :]
    sums = tl.zeros((SIZE, SIZE), tl.float32)
    for i in tl.range(0, 3):
        sums += _scaled(tl.load(given + square, mask=square < count, other=1.0), i)
    sums = tl.dot(sums, tl.trans(sums)) + tl.max(sums, 1)[:, None] + tl.cumsum(sums, 0)
    wide = (at.to(tl.int64) * 3 + 200) // 7 % 5
    seen = (at[:, None] > 2) & (wide[None, :] != 1) | (at[None, :] == tl.program_id(0))
    sums = tl.where(seen, 0.5 * sums - 1, (sums / 3.0 + wide[:, None]) * -0.0) + 1e-40 + (2 - at)[:, None]
    tl.store(wanted + square, sums, mask=square < count)


def run() -> Tensor:
    given = torch.arange(32.0 * 32).reshape(32, 32).sin()
    found = torch.zeros_like(given)
    _kernel[(2,)](given, found, 900, SIZE=16)
    return found


def test_triton_language_is_as_before_after_a_launch() -> None:
    def members() -> list[dict[str, Any]]:
        return [dict(vars(thing)) for thing in (tl, tl.core, tl.math, tl.tensor, tl.dtype)]

    run()
    before = members()
    run()
    assert members() == before
    assert tl.core.is_builtin(tl.load)


_AS_IT_IS = """
import sys, torch
from tests import quick_interpreter
quick_interpreter.KNOWN = ()
from tests import test_quick_interpreter
torch.save(test_quick_interpreter.run(), sys.argv[1])
"""


def test_numbers_are_those_of_the_interpreter_as_it_is(tmp_path: Path) -> None:
    if not triton.__version__.startswith(quick_interpreter.KNOWN):
        pytest.skip(f"the interpreter of Triton {triton.__version__} is left as it is")
    path = tmp_path / "found.pt"
    fresh.run(_AS_IT_IS, str(path))
    assert torch.equal(torch.load(path), run())
