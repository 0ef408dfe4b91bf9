"""A launch as Inductor takes it: tensors and integers are parameters, all else is text; and what is compiled of that text."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.launching.flat_kernels import FlatLaunch, flat
from attn_compiler.lowerings.shared.launching.launch import Arguments
from tests.lowerings.shared import compiled_flat
from tests.lowerings.shared.compiled_flat import CASES, Found
from tests.lowerings.shared.kernels.compilers import printed_by

TILE = Tile(queries=64, keys=32, warps=8, stages=3, registers=168)


class Pair(NamedTuple):
    factor: Any
    shift: Any


class Settings(NamedTuple):
    LENGTH: Any
    NAME: Any


@triton.jit
def shifted(X, Y, More, pair, HOW: tl.constexpr, SECOND: tl.constexpr):
    """Y: X · factor + shift. More: added, if there is any."""
    how: tl.constexpr = members(HOW)
    at = tl.arange(0, how.LENGTH)
    y = tl.load(X + at) * pair.factor + pair.shift
    if More is not None:
        y += tl.load(More + at)
    tl.store(Y + at, y)


def _arguments(*, factor: int = 3, shift: float = 0.5, length: int = 8, tile: Tile | None = None) -> Arguments:
    numbers = {
        "pair": Pair(factor=factor, shift=shift),
        "HOW": Settings(LENGTH=length, NAME="it"),
        "SECOND": True,
    }
    return Arguments(grid=(1, 1, 1), tensors={"X": "x", "Y": "y", "More": None}, numbers=numbers, tile=tile)


def _launched(launch: FlatLaunch) -> torch.Tensor:
    named = {"x": torch.arange(8.0), "y": torch.zeros(8)}
    given = {name: named[source] for name, source in launch.tensors.items()}
    launch.kernel[(1, 1, 1)](**given, **launch.numbers)
    return named["y"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors")
@pytest.mark.parametrize("tile", [None, TILE])
def test_it_computes_what_the_kernel_does(tile: Tile | None) -> None:
    assert torch.equal(_launched(flat(shifted, _arguments(tile=tile))), torch.arange(8.0) * 3 + 0.5)


def test_tensors_and_integers_are_parameters() -> None:
    launch = flat(shifted, _arguments())
    assert launch.tensors == {"X": "x", "Y": "y"}
    assert launch.numbers == {"pair_factor": 3}
    assert launch.kernel.arg_names == ["X", "Y", "pair_factor"]
    assert launch.kernel.fn.__name__ == "packaged_shifted"


def test_launches_that_differ_in_integers_share_a_kernel() -> None:
    kernel = flat(shifted, _arguments()).kernel
    assert flat(shifted, _arguments(factor=7)).kernel is kernel
    assert flat(shifted, _arguments(length=4)).kernel is not kernel
    assert flat(shifted, _arguments(shift=0.25)).kernel is not kernel
    assert flat(shifted, _arguments(tile=TILE)).kernel is not kernel


def test_the_tile_says_how_it_is_compiled() -> None:
    (config,) = flat(shifted, _arguments(tile=TILE)).kernel.configs
    assert (config.num_warps, config.num_stages) == (8, 3)
    # Inductor passes on what is among a config's arguments, and no other option than those two.
    assert config.kwargs == {"maxnreg": 168}


# ---- compiled for sm90, without a GPU ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> dict[str, Found]:
    return {each["case"]: Found(**each) for each in printed_by(compiled_flat)}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("case", CASES)
def test_the_text_that_inductor_copies_is_compiled(case: str, compiled: dict[str, Found]) -> None:
    found = compiled[case]
    assert len(found.code) == (2 if case == "lists" else 1)
    assert all(size > 0 for size in found.code)


@pytest.mark.parametrize("case", CASES)
def test_inductor_sees_what_is_written(case: str, compiled: dict[str, Found]) -> None:
    """Else it takes all tensors for written, and copies them."""
    expected = [["OfKeys"], ["OfKeys", "Lists"]] if case == "lists" else [["Out", "Lse"]]
    assert compiled[case].written == expected
