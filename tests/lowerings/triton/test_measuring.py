"""Measuring through Triton's interpreter, with a clock of the test's own; on a GPU with the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.errors import OutOfResources

from attn_compiler.lowerings.base import Tile, Tiles
from attn_compiler.lowerings.shared.launching import Arguments
from attn_compiler.lowerings.triton import launch as triton_launch
from attn_compiler.lowerings.triton.autotune import Unfit
from attn_compiler.lowerings.triton.measuring import Measurer, gpu_clock
from attn_compiler.spec.attention import AttentionSpec
from attn_compiler.spec.scores import Sinks, Softcap
from tests.lowerings.specs import CAUSAL, bias, dense, make_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = ("forward", "grad_q", "grad_kv")
SMALL = Tile(queries=32, keys=32, warps=4, stages=1)
TILES = Tiles(forward=SMALL, grad_q=SMALL, grad_kv=SMALL)


def small(**given: object) -> AttentionSpec:
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "head_dim": 16, "seqlen_q": 40, "seqlen_kv": 70}
    return make_spec(**{**sizes, "dtype": "float32", "device": DEVICE.type, **given})  # type: ignore[arg-type]


SPECS = {
    "open": small(),
    "causal": small(mask=CAUSAL, changes=(Softcap(cap=20.0), Sinks(requires_grad=True))),
    "padded": small(seqlen_kv=520, mask=dense(1, 1, 1, 520)),
    "bias": small(changes=(bias(1, 2, 40, 70, dtype="float32"),)),
}


def clock(run: Callable[[], object]) -> float:
    run()
    run()
    return 7.0


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_runs_alone(name: str, kernel: str) -> None:
    launched: list[str] = []
    launch = triton_launch.launch

    def counting(function: object, *others: object) -> None:
        launched.append(function.fn.__name__)  # type: ignore[attr-defined]
        launch(function, *others)  # type: ignore[arg-type]

    with mock.patch.object(triton_launch, "launch", counting):
        assert Measurer(SPECS[name], DEVICE, clock)(kernel, TILES) == 7.0
    before = ["attention_forward", "attention_row_stats"] if kernel != "forward" else []
    asked = f"attention_{kernel}" + ("_kept" if (name, kernel) == ("bias", "grad_q") else "")
    assert launched == [*before, asked, asked]


@pytest.mark.parametrize(("requires_grad", "kept"), [(True, "Scores"), (False, None)])
def test_what_is_measured_is_what_a_backward_launches(requires_grad: bool, kept: str | None) -> None:
    """Where a bias is learned, dq reads the scores' gradients that the pass over the keys keeps."""
    learned = bias(1, 2, 40, 70, dtype="float32", requires_grad=requires_grad)
    spec, seen = small(changes=(learned,), needs_grad=True), list[Arguments]()
    launch = triton_launch.launch

    def looking(function: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str = "") -> None:
        seen.append(arguments())
        launch(function, same, tensors, arguments, part)

    with mock.patch.object(triton_launch, "launch", looking):
        Measurer(spec, DEVICE, clock)("grad_q", TILES)
    assert seen[-1].tensors.get("Scores") == kept


def test_tiles_are_those_asked_for() -> None:
    seen: list[Tile] = []
    launch = triton_launch.launch

    def looking(function: Any, same: Any, tensors: Any, arguments: Callable[[], Arguments], part: str = "") -> None:
        seen.append(arguments().tile)
        launch(function, same, tensors, arguments, part)

    wide = dataclasses.replace(SMALL, keys=64)
    with mock.patch.object(triton_launch, "launch", looking):
        Measurer(SPECS["open"], DEVICE, clock)("grad_q", dataclasses.replace(TILES, grad_q=wide))
    assert seen == [SMALL, None, wide, wide]


@pytest.mark.parametrize(
    "error", [OutOfResources(300_000, 232_448, "shared memory"), torch.OutOfMemoryError("CUDA out of memory\nTried")]
)
def test_what_does_not_fit_is_said_in_a_line(error: Exception) -> None:
    def fails(_: object) -> float:
        raise error

    with pytest.raises(Unfit) as caught:
        Measurer(SPECS["open"], DEVICE, fails)("forward", TILES)
    assert str(caught.value).startswith(type(error).__name__)
    assert "\n" not in str(caught.value)


def test_a_mistake_of_ours_is_no_misfit() -> None:
    with pytest.raises(KeyError, match="sideways"):
        Measurer(SPECS["open"], DEVICE, clock)("sideways", TILES)


def test_tensors_are_real_while_a_compiler_traces() -> None:
    kinds: list[type] = []

    def looks(run: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> float:
        kinds.append(type(run()[0]))
        return 1.0

    with FakeTensorMode():
        Measurer(SPECS["open"], DEVICE, looks)("forward", TILES)
    assert kinds == [torch.Tensor]


@pytest.mark.gpu
def test_microseconds_on_a_gpu() -> None:
    # 4 · 8 · 8 · 4096² / 2 · 64 operations take an H200 no less than 50 µs, and no GPU since Ampere a second.
    spec = make_spec(batch=8, heads=8, heads_kv=8, seqlen_q=4096, seqlen_kv=4096, mask=CAUSAL)
    tile = Tile(queries=64, keys=64, warps=4, stages=3)
    found = [Measurer(spec, DEVICE)(k, Tiles(forward=tile, grad_q=tile, grad_kv=tile)) for k in KERNELS]
    assert all(50 < time < 1e6 for time in found)


@pytest.mark.gpu
def test_what_a_gpu_has_no_room_for_is_unfit() -> None:
    spec = make_spec(seqlen_q=1024, seqlen_kv=1024, head_dim=256)
    # Four stages of K and V with 128 rows of 512 bytes each.
    tile = Tile(queries=64, keys=128, warps=8, stages=4)
    with pytest.raises(Unfit, match="OutOfResources"):
        Measurer(spec, DEVICE, gpu_clock)("forward", Tiles(forward=tile, grad_q=tile, grad_kv=tile))
