"""Launches are noted and handed over where somebody takes them; they are taken apart into text, and tensors without memory stand in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared.kernels.releases import members
from attn_compiler.lowerings.shared.launching import dry_tensors
from attn_compiler.lowerings.shared.launching.dry_run import noter, noting, recorder, recording
from attn_compiler.lowerings.shared.launching.dry_tensors import NoExampleError, Pointer, TensorLayout
from attn_compiler.lowerings.shared.launching.flat_kernels import FlatLaunch, flat
from attn_compiler.lowerings.shared.launching.launch import Arguments, launch
from attn_compiler.lowerings.shared.launching.replaying import CallCache, call_cache
from tests.lowerings.shared import compiled_flat
from tests.lowerings.shared.compiled_flat import CASES, Found
from tests.lowerings.shared.kernels.compilers import printed_by

pytest.importorskip("triton")


# Launches are handed over where somebody takes them, and in no other thread.
class _Taker:
    def __init__(self) -> None:
        self.made: list[Any] = []
        self.taken: list[tuple[Any, Any]] = []

    def allocated(self, tensor: Any) -> None:
        self.made.append(tensor)

    def launched(self, kernel: Any, tensors: Mapping[str, Any], arguments: Any) -> None:
        self.taken.append((kernel, arguments))


def test_nobody_takes_launches_outside_of_the_block() -> None:
    taker = _Taker()
    assert recorder() is None
    with recording(taker):
        assert recorder() is taker
    assert recorder() is None
    with pytest.raises(ValueError, match="inner"), recording(taker):
        raise ValueError("inner")
    assert recorder() is None


@pytest.mark.parametrize(
    ("within", "asked"), [(lambda: recording(_Taker()), recorder), (lambda: noting(lambda *_: None), noter)]
)
def test_other_threads_launch(within: Callable[[], Any], asked: Callable[[], Any]) -> None:
    found: list[Any] = []
    with within():
        thread = threading.Thread(target=lambda: found.append(asked()))
        thread.start()
        thread.join()
    assert found == [None]


def test_a_launch_is_handed_over_and_nothing_is_kept() -> None:
    taker, same = _Taker(), CallCache(device=torch.device("cpu"))
    arguments = Arguments(grid=(1, 1, 1), tensors={"X": "x"}, numbers={})
    kernel = object()
    with recording(taker):
        made = same.empty("x", lambda: torch.empty(2))
        assert launch(kernel, same, {"x": made}, lambda: arguments) is None
    assert taker.made == [made]
    assert taker.taken == [(kernel, arguments)]
    assert (same.launches, same.empties) == ({}, {})


def test_calls_that_are_recorded_know_nothing_of_others() -> None:
    tensors = [torch.empty(3)]
    known = call_cache("recorded", "", tensors)
    assert call_cache("recorded", "", tensors) is known
    with recording(_Taker()):
        assert call_cache("recorded", "", tensors) is not known
    assert call_cache("recorded", "", tensors) is known


# Launches are noted where somebody notes them, and in no other thread.
def test_nobody_notes_outside_of_the_block() -> None:
    def note(kernel: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None: ...

    assert noter() is None
    with noting(note):
        assert noter() is note
    assert noter() is None


def test_the_one_outside_notes_again_when_the_inner_block_is_left_by_an_exception() -> None:
    found: list[str] = []
    with noting(lambda *_: found.append("outer")):
        with pytest.raises(ValueError, match="inner"), noting(lambda *_: found.append("inner")):
            raise ValueError("inner")
        note = noter()
        assert note is not None
        note(None, (), {})
    assert found == ["outer"]


# A launch as Inductor takes it.
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
    numbers = {"pair": Pair(factor=factor, shift=shift), "HOW": Settings(LENGTH=length, NAME="it"), "SECOND": True}
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


# Tensors without memory lie as the values that they stand for, and have addresses.
VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "slice": lambda x: x[:, 1:],
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "no elements": lambda x: x[:, :0],
    "a number": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_stand_in_lies_as_its_value(view: str) -> None:
    value = VIEWS[view](torch.zeros(2, 3, 8, dtype=torch.bfloat16))
    with dry_tensors.without_memory():
        made = dry_tensors.made(dry_tensors.described(value))
        assert (made.shape, made.stride(), made.dtype, made.device) == (
            value.shape,
            value.stride(),
            value.dtype,
            value.device,
        )
        assert made.storage_offset() == value.storage_offset()
        assert made.data_ptr() == 2 * value.storage_offset()


def test_addresses_of_views_follow_their_offsets() -> None:
    with dry_tensors.without_memory():
        x = TensorLayout.read(torch.zeros(4, 8, dtype=torch.float32)).made()
        assert (x.data_ptr(), x.view(torch.uint8).data_ptr(), x.select(0, 1).data_ptr()) == (0, 0, 32)
        assert x.t().contiguous().data_ptr() == 0
        assert dry_tensors.pointers((x.select(0, 1), 7, None)) == (Pointer(dtype=torch.float32, address=32), 7, None)


def test_a_gpu_that_is_not_there_can_be_imagined() -> None:
    with FakeTensorMode():
        value = torch.empty(2, 3, device="cuda:1")
    with dry_tensors.without_memory():
        made = dry_tensors.made(dry_tensors.described(value))
        assert (made.device, made.is_cuda, made.data_ptr()) == (torch.device("cuda:1"), True, 0)


def test_lists_and_what_is_no_tensor_stay() -> None:
    value = torch.zeros(3)
    described = dry_tensors.described([value, None, "text", 2.5])
    assert described == dry_tensors.described([torch.ones(3), None, "text", 2.5])
    with dry_tensors.without_memory():
        tensor, *others = dry_tensors.made(described)
    assert (tuple(tensor.shape), others) == ((3,), [None, "text", 2.5])


def test_symbolic_sizes_are_those_of_this_call_and_no_guard_is_added() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        value = mode.from_tensor(torch.zeros(5, 16), static_shapes=False)
        guards = len(env.guards)
        assert dry_tensors.described(value) == TensorLayout.read(torch.zeros(5, 16))
        assert dry_tensors.described([value.shape[0] * 2]) == (10,)
        assert len(env.guards) == guards


def test_sizes_that_nobody_knows_while_compiling_are_told() -> None:
    env = ShapeEnv()
    with pytest.raises(NoExampleError, match="not known"):
        dry_tensors.described(env.create_unbacked_symint())


def test_outside_of_the_block_tensors_have_their_own_addresses() -> None:
    x = torch.zeros(4)
    with dry_tensors.without_memory():
        pass
    assert x.data_ptr() != 0
