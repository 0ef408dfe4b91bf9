"""What a further launch reuses of the first, with stand-ins for kernels: on a GPU the Triton family's tests run each case twice."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import _allocation

from attn_compiler.lowerings.base import Tile
from attn_compiler.lowerings.shared.kernels import tuples
from attn_compiler.lowerings.shared.launching import launch as launching, persistent, replaying
from attn_compiler.lowerings.shared.launching.launch import Arguments, launch
from attn_compiler.lowerings.shared.launching.on_device import Empty, new_outputs, on
from attn_compiler.lowerings.shared.launching.replaying import call_cache
from attn_compiler.lowerings.shared.ops import leaf_ops as ops
from tests.lowerings.shared.lying import LYING_OTHERWISE

# What a further launch reuses of the first, with stand-ins for kernels.
TILE = Tile(queries=32, keys=32, warps=8, stages=3)
STREAM = 77


class Compiled:
    """Keeps what it is run with."""

    function, packed_metadata = "function", "metadata"
    metadata = types.SimpleNamespace(global_scratch_size=0)

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.launches: list[Any] = []

    def run(self, *given: Any) -> None:
        self.runs.append(given)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given: self.launches.append((grid, given))


class Kernel:
    """Keeps what it is compiled for."""

    arg_names = ("Q", "Absent", "number", "Out")

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.compiled = Compiled()

    def __getitem__(self, grid: Any) -> Callable[..., Compiled]:
        def compile_and_run(**given: Any) -> Compiled:
            self.calls.append((grid, given))
            return self.compiled

        return compile_and_run


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "current_cuda_device", lambda: 0)
    monkeypatch.setattr(triton.runtime, "driver", mock.Mock())
    triton.runtime.driver.active.get_current_stream.return_value = STREAM


def arguments(asked: list[int]) -> Callable[[], Arguments]:
    def give() -> Arguments:
        asked.append(1)
        return Arguments(
            grid=(2, 1, 1), tensors={"Q": "q", "Absent": None, "Out": "out"}, numbers={"number": 7}, tile=TILE
        )

    return give


def run(kernel: Kernel, q: Tensor, out: Tensor, asked: list[int], text: str = "text") -> None:
    launch(kernel, call_cache("op", text, (q,)), {"q": q, "out": out, "of another kernel": q}, arguments(asked))


def test_a_launch_says_how_products_and_sums_are_rounded() -> None:
    """Releases of Triton have other defaults."""
    kernel, q = Kernel(), torch.randn(4, 8)
    run(kernel, q, torch.empty_like(q), [])
    ((_, given),) = kernel.calls
    assert given["enable_fp_fusion"] is True


def test_a_further_call_has_its_own_tensors_and_the_numbers_of_the_first() -> None:
    kernel, asked = Kernel(), list[int]()
    first, second = (tuple(torch.empty(4, 8) for _ in range(2)) for _ in range(2))
    run(kernel, *first, asked)
    run(kernel, *second, asked)
    ((grid, given),), (later,) = kernel.calls, kernel.compiled.runs
    assert grid == (2, 1, 1)
    assert (given["Q"], given["Absent"], given["Out"]) == (first[0], None, first[1])
    assert (given["number"], given["num_warps"], given["num_stages"]) == (7, 8, 3)
    assert later[:3] == (2, 1, 1)
    assert later[3:6] == (STREAM, "function", "metadata")
    assert later[-4:] == (second[0].data_ptr(), None, 7, second[1].data_ptr())
    assert len(asked) == 1


@pytest.mark.parametrize("other", LYING_OTHERWISE.values(), ids=LYING_OTHERWISE)
def test_a_call_whose_tensors_lie_otherwise_has_its_own_numbers(other: Tensor) -> None:
    kernel, asked = Kernel(), list[int]()
    run(kernel, torch.empty(4, 8), other, asked)
    run(kernel, other, other, asked)
    assert len(asked) == 2
    assert not kernel.compiled.runs


def test_another_text_is_another_call() -> None:
    kernel, asked = Kernel(), list[int]()
    q = torch.empty(4, 8)
    run(kernel, q, q, asked)
    run(kernel, q, q, asked, text="other")
    assert len(asked) == 2


def test_kernels_of_one_call_are_kept_apart() -> None:
    one, other, asked = Kernel(), Kernel(), list[int]()
    q = torch.empty(4, 8)
    for kernel in (one, other, one):
        run(kernel, q, q, asked)
    assert len(asked) == 2
    assert (len(one.compiled.runs), len(other.compiled.runs)) == (1, 0)


def test_parts_of_one_kernel_are_kept_apart() -> None:
    kernel, asked = Kernel(), list[int]()
    q = torch.empty(4, 8)
    for part in ("k", "v", "k"):
        launch(kernel, call_cache("op", "text", (q,)), {"q": q, "out": q}, arguments(asked), part)
    assert len(asked) == 2
    assert len(kernel.compiled.runs) == 1


def test_profilers_that_hook_into_launches_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, asked = Kernel(), list[int]()
    q = torch.empty(4, 8)
    run(kernel, q, q, asked)
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    run(kernel, q, q, asked)
    assert not kernel.compiled.runs
    assert kernel.compiled.launches == [((2, 1, 1), (q.data_ptr(), None, 7, q.data_ptr()))]


def test_nothing_is_launched_on_an_empty_grid() -> None:
    kernel = Kernel()
    q = torch.empty(0)
    empty = Arguments(grid=(0, 1, 1), tensors={"Q": "q"}, numbers={})
    launch(kernel, call_cache("op", "text", (q,)), {"q": q}, lambda: empty)
    assert not kernel.calls


def test_truth_values_are_read_as_bytes() -> None:
    kernel, asked = Kernel(), list[int]()
    q = torch.ones(4, dtype=torch.bool)
    run(kernel, q, q, asked)
    ((_, given),) = kernel.calls
    assert given["Q"].dtype == torch.uint8
    assert given["Q"].data_ptr() == q.data_ptr()


class Promised(launching.FutureKernel):  # type: ignore[misc]
    """What Triton gives for a kernel that is still being compiled."""

    def __init__(self, kernel: Compiled) -> None:
        self.kernel = kernel


def test_what_triton_compiles_in_threads_of_its_own_is_waited_for() -> None:
    """Within `triton.AsyncCompileMode`: what stands for the kernel has no grid to be launched on."""
    kernel, asked = Kernel(), list[int]()
    compiled, kernel.compiled = kernel.compiled, cast(Compiled, Promised(kernel.compiled))
    q = torch.empty(4, 8)
    for _ in range(2):
        run(kernel, q, q, asked)
    (ready,) = call_cache("op", "text", (q,)).launches.values()
    assert ready.compiled is compiled
    assert len(compiled.runs) == 1


# ---- tuples -------------------------------------------------------------------------------------------------------


def test_members_are_put_into_the_tuple_that_a_kernel_takes() -> None:
    strides = {"grad_b": 8, "grad_h": 4, "grad_q": 2, "grad_k": 1}
    taken = launching.as_taken(("Q", "stride_grad", "number"), {**strides, "number": 7})
    assert taken == {"stride_grad": tuples.GradStrides(**strides), "number": 7}


def test_what_a_kernel_has_no_place_for_is_left_for_it_to_refuse() -> None:
    strides = tuples.GradStrides(8, 4, 2, 1)
    given = {"stride_grad": strides, "other": 1}
    assert launching.as_taken(("stride_grad",), given) == given


def test_a_further_launch_gets_tuples_without_names() -> None:
    strides = tuples.Strides(4, 2, 1)
    assert type(launching.plain((strides, 1))[0]) is tuple
    assert launching.plain((strides, 1)) == ((4, 2, 1), 1)
    assert launching.plain("ieee") == "ieee"


# ---- what a launch asks of Triton --------------------------------------------------------------------------------


def test_kernels_that_want_room_get_it_and_whoever_gave_it_before_keeps_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors for the copy engine are written to memory that Triton asks for at each launch."""
    asked: list[Any] = []

    class Wanting(Compiled):
        metadata = types.SimpleNamespace(global_scratch_size=512)

        def run(self, *given: Any) -> None:
            asked.append(_allocation._allocator.get())

    before = _allocation._allocator.set(own := mock.Mock())
    try:
        launching.start(Wanting(), (1, 1, 1), None, [])
        launching.start(Compiled(), (1, 1, 1), None, [])
        assert asked == [launching._on_current_device]
        assert _allocation._allocator.get() is own
    finally:
        _allocation._allocator.reset(before)


def test_hooks_of_profilers_do_not_cost_that_room(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Hooked(Compiled):
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *given: asked.append(_allocation._allocator.get())

    hooks = types.SimpleNamespace(calls=[print])
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hooks)
    launching.start(Hooked(), (1, 1, 1), None, [])
    assert asked == [launching._on_current_device]


# ---- what is replayed ---------------------------------------------------------------------------------------------


class Descriptor:
    """As those of the copy engine: it checks what it is made of."""

    made = 0

    def __init__(self, base: Tensor, tile: int) -> None:
        self.base, self.tile = base, tile
        type(self).made += 1


def further_launches(made: dict[str, Any], tensors: dict[str, str | None]) -> tuple[Compiled, Tensor, Tensor]:
    """The kernel after three calls, of which the third was replayed, and what that one was given and made."""
    kernel, q, out = Kernel(), torch.empty(4, 8), torch.empty(4, 8)
    asked = Arguments(grid=(2, 1, 1), tensors=tensors, numbers={"number": 7}, made=made)
    same = call_cache("op", "text", (q,))
    same.device = torch.device("cpu", 0)
    for _ in range(2):
        ran = [launch(kernel, same, {"q": q, "out": same.empty("out", lambda: out)}, lambda: asked)]
    same.keep(ran, inputs=("q",), returned=("out", None))
    assert same.replay is not None
    found, _ = same.replay.run([other := torch.empty(4, 8)])
    return kernel.compiled, other, found


def test_a_replay_fills_in_addresses() -> None:
    compiled, q, out = further_launches({}, {"Q": "q", "Absent": None, "Out": "out"})
    assert compiled.runs[-1][-4:] == (q.data_ptr(), None, 7, out.data_ptr())


def test_a_descriptor_is_made_once_and_then_of_other_tensors() -> None:
    Descriptor.made = 0
    made = {"Q": ("q", lambda x: Descriptor(x, 64))}
    compiled, q, out = further_launches(made, {"Absent": None, "Out": "out"})
    assert Descriptor.made == 1
    for given in compiled.runs:
        assert isinstance(given[-4], Descriptor)
        assert given[-4].tile == 64
    assert compiled.runs[-1][-4].base is q
    assert compiled.runs[-1][-1] == out.data_ptr()


def test_no_tensor_of_the_first_call_is_held() -> None:
    kernel, q = Kernel(), torch.empty(4, 8)
    asked = Arguments(grid=(2, 1, 1), tensors={}, numbers={}, made={"Q": ("q", lambda x: Descriptor(x, 64))})
    launch(kernel, call_cache("op", "text", (q,)), {"q": q}, lambda: asked)
    kernel.calls.clear()
    held = weakref.ref(q)
    del q
    assert held() is None


def test_what_is_made_of_a_tensor_is_made_of_each() -> None:
    compiled, q, _ = further_launches({"Q": ("q", lambda x: x[1].data_ptr())}, {"Out": "out"})
    assert compiled.runs[-1][-4] == q[1].data_ptr()


# Grids of kernels whose programs stay for several blocks.
def _bytes(heads: int, seqlen: int) -> torch.Tensor:
    return torch.empty((2, heads, seqlen, 128), dtype=torch.uint8, device="meta")


def test_heads_that_take_turns_share_the_cache() -> None:
    """64 heads of 8192 keys and values, of which 32 MB are used at a time."""
    k = _bytes(heads=32, seqlen=8192)
    assert persistent.section(k, k, heads_q=32, reach=8192) == 16
    # Within a window of 1024 keys all heads' fit.
    assert persistent.section(k, k, heads_q=32, reach=1024) == 64


def test_heads_of_one_head_of_keys_stay_together() -> None:
    k = _bytes(heads=8, seqlen=8192)
    assert persistent.section(k, k, heads_q=32, reach=8192) == 64


def test_halves_take_twice_the_room() -> None:
    k = _bytes(heads=32, seqlen=8192).to(torch.bfloat16)
    assert persistent.section(k, k, heads_q=32, reach=8192) == 8


@pytest.mark.parametrize(
    ("heads", "programs", "at_once"),
    [(32, 132, 32), (66, 132, 66), (128, 132, 64), (256, 132, 64), (200, 132, 50), (3, 1, 1), (1, 132, 1), (0, 132, 0)],
)
def test_heads_at_once_have_two_blocks_under_way_each(heads: int, programs: int, at_once: int) -> None:
    assert persistent.heads_at_once(heads, programs) == at_once


def test_reach_is_what_a_band_lets_a_query_see() -> None:
    far = 1 << 30
    assert persistent.reach({"band_left": far, "band_right": 0, "seqlen_kv": 4096}) == 4096
    assert persistent.reach({"band_left": 100, "band_right": 7, "seqlen_kv": 4096}) == 108
    assert persistent.reach({"band_left": -100, "band_right": 7, "seqlen_kv": 4096}) == 1


# On any device.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7, 4), (1, 1, 1, 8, 8)])
def test_outputs_lie_as_every_family_s(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, seqlen_q, head_dim, head_dim_v = sizes
    q = torch.empty(batch, heads, seqlen_q, head_dim, dtype=dtype)
    v = torch.empty(batch, heads, 9, head_dim_v, dtype=dtype)
    for found, expected in zip(new_outputs(q, v), ops.empty_outputs(q, v), strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert [s for s, n in zip(found.stride(), found.shape, strict=True) if n > 1] == [
            s for s, n in zip(expected.stride(), expected.shape, strict=True) if n > 1
        ]


def test_what_is_allocated_lies_as_the_first() -> None:
    first = torch.empty(3, 5, 4, dtype=torch.float16).transpose(0, 1)
    found = Empty.like(first).make()
    assert found.data_ptr() != first.data_ptr()
    assert (found.shape, found.stride(), found.dtype) == (first.shape, first.stride(), first.dtype)


def test_nothing_is_switched_where_there_is_one_device() -> None:
    with on(torch.device("cpu")) as switched:
        assert switched is None
