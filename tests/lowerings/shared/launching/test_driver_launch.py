"""What the driver is given, by a stand-in that reads it as the driver does; on a GPU what the launches compute."""

from __future__ import annotations

import ctypes
import struct
import threading
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_compiler.lowerings.shared.launching import driver_launch, launch as launching
from attn_compiler.lowerings.shared.launching.launch import Arguments
from attn_compiler.lowerings.shared.launching.replaying import CallCache, Start

STREAM, FUNCTION = 77, 4242
_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
SIGNATURE = {
    "X": "*fp32",
    "Absent": "constexpr",
    "numbers": ("i32", "constexpr", "i64", ("i1", "fp32")),
    "less": "i32",
    "wide": "fp64",
    "Y": "*i8",
    "HOW": "constexpr",
}
VALUES: tuple[Any, ...] = (None, None, (7, 1, 1 << 40, (True, 0.5)), -3, 2.5, None, ("constant", 1))
WHERE = ((0, 1), (5, 0))


def compiled(signature: dict[str, Any] | None = None, declared: int = 10, **metadata: Any) -> Any:
    """declared: parameters in the code, with the two that Triton adds."""
    given = {"num_warps": 8, "num_ctas": 1, "shared": 1024, "launch_pdl": False, "launch_cooperative_grid": False}
    given |= {"global_scratch_size": 0, "profile_scratch_size": 0}
    text = ",\n".join(f"\t.param .u64 kernel_param_{i}" for i in range(declared))
    return types.SimpleNamespace(
        src=types.SimpleNamespace(signature=SIGNATURE if signature is None else signature),
        asm={"ptx": f".version 8.7\n.visible .entry kernel(\n{text}\n)\n.reqntid 256\n{{ ld.param.b64 %rd1, [x]; }}"},
        metadata=types.SimpleNamespace(**{**given, **metadata}),
        function=FUNCTION,
    )


class Driver:
    """Keeps what it launches. result: of each launch."""

    def __init__(self) -> None:
        self.result = 0
        self.launched: list[dict[str, Any]] = []
        self.run = _RUN(self._run)

    def _run(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        # As CUlaunchConfig has it: seven numbers, the stream, the attributes and how many they are.
        *sizes, stream, attributes, count = struct.unpack("=7I4xQQI", ctypes.string_at(config, 52))
        at = (ctypes.c_void_p * 10).from_address(parameters)
        kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_bool, ctypes.c_float, ctypes.c_int32)
        kinds += (ctypes.c_double, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
        self.launched.append(
            {
                "grid": tuple(sizes[:3]),
                "block": tuple(sizes[3:6]),
                "shared": sizes[6],
                "stream": stream,
                "attributes": [struct.unpack("=i4xi", ctypes.string_at(attributes + 72 * i, 12)) for i in range(count)],
                "function": function,
                "extra": extra,
                "parameters": [kind.from_address(place).value for kind, place in zip(kinds, at, strict=True)],
            }
        )
        return self.result


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver_launch, "driver", lambda: made.run)
    active = types.SimpleNamespace(get_current_stream=lambda device: STREAM + device)
    monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=active))
    return made


def bound(kernel: Any, otherwise: Any, values: tuple[Any, ...] = VALUES) -> Start:
    return driver_launch.bound(kernel, (2, 3, 1), 1, values, WHERE, 3, otherwise)


def never(*given: Any) -> None:
    raise AssertionError("Triton's launcher was asked")


def test_numbers_stay_and_addresses_are_each_call_s_own(driver: Driver) -> None:
    launch = bound(compiled(), never)
    launch([], [100, 200, 300])
    launch([], [1 << 63, (1 << 47) + 16, 0])
    first, second = driver.launched
    assert first["parameters"] == [200, 7, 1 << 40, True, 0.5, -3, 2.5, 100, 0, 0]
    assert second["parameters"] == [(1 << 47) + 16, 7, 1 << 40, True, 0.5, -3, 2.5, 1 << 63, 0, 0]
    assert {name: first[name] for name in ("grid", "block", "shared", "stream", "function", "extra", "attributes")} == {
        "grid": (2, 3, 1),
        "block": (256, 1, 1),
        "shared": 1024,
        "stream": STREAM + 1,
        "function": FUNCTION,
        "extra": None,
        "attributes": [],
    }


def test_a_kernel_that_begins_before_the_one_ahead_ends_says_so(driver: Driver) -> None:
    bound(compiled(launch_pdl=True), never)([], [1, 2, 3])
    assert driver.launched[0]["attributes"] == [(6, 1)]


def test_memory_of_a_kernel_s_own_is_allocated_for_each_launch(driver: Driver) -> None:
    asked: list[Any] = []
    memory = [torch.empty(8), torch.empty(8)]

    def allocator(*given: Any) -> Callable[[], Tensor]:
        asked.append(given)
        return lambda: memory[len(driver.launched)]

    with mock.patch.object(driver_launch, "allocator", allocator):
        launch = bound(compiled(global_scratch_size=128), never)
    launch([], [1, 2, 3])
    launch([], [1, 2, 3])
    assert asked == [((128 * 6,), (1,), torch.int8, "cuda")]
    assert [one["parameters"][-2] for one in driver.launched] == [x.data_ptr() for x in memory]


@pytest.mark.parametrize(
    "kernel",
    [
        compiled(num_ctas=2),
        compiled(launch_cooperative_grid=True),
        compiled(profile_scratch_size=16),
        compiled(SIGNATURE | {"wide": "tensordesc<fp16[64, 64]>"}),
        compiled(SIGNATURE | {"wide": "fp16"}),
        compiled(declared=9),
    ],
    ids=["cluster", "cooperative", "profiled", "descriptor", "half", "another number of parameters"],
)
def test_what_is_not_described_goes_by_triton(driver: Driver, kernel: Any) -> None:
    assert bound(kernel, never) is never


def test_without_a_driver_triton_launches() -> None:
    with mock.patch.object(driver_launch, "driver", return_value=None):
        assert bound(compiled(), never) is never


def test_where_the_driver_takes_no_launch_triton_is_asked(driver: Driver) -> None:
    asked: list[Any] = []
    launch = bound(compiled(), lambda *given: asked.append(given))
    driver.result = 201
    launch([], [1, 2, 3])
    driver.result = 0
    launch([], [4, 5, 6])
    assert asked == [([], [1, 2, 3])]
    assert len(driver.launched) == 2


def test_profilers_that_hook_into_launches_see_them(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    launch = bound(compiled(), lambda *given: asked.append(given))
    monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [print])
    launch([], [1, 2, 3])
    assert asked == [([], [1, 2, 3])]
    assert not driver.launched


def test_threads_at_one_place_launch_their_own(driver: Driver) -> None:
    launch = bound(compiled(), never)

    def many(first: int) -> None:
        for address in range(first, first + 500):
            launch([], [address, address, address])

    threads = [threading.Thread(target=many, args=(1000 * i,)) for i in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = [(one["parameters"][0], one["parameters"][7]) for one in driver.launched]
    assert all(x == y for x, y in pairs)
    assert sorted(x for x, _ in pairs) == [1000 * i + j for i in range(1, 4) for j in range(500)]


@triton.jit
def scaled(X, Absent, Y, n, factor, some, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n)
    tl.store(Y + at, x * factor + some, mask=at < n)


class Scaled:
    """y = 1.5 x - 2, launched once by Triton; `again` launches it by the driver."""

    def __init__(self, x: Tensor) -> None:
        self.same = CallCache(device=x.device)
        numbers = {"n": x.numel(), "factor": 1.5, "some": -2, "BLOCK": 128}
        self.y = torch.empty_like(x)
        ready = launching.launch(
            scaled,
            self.same,
            {"x": x, "y": self.y},
            lambda: Arguments(
                grid=(triton.cdiv(x.numel(), 128), 1, 1), tensors={"X": "x", "Absent": None, "Y": "y"}, numbers=numbers
            ),
        )
        assert ready is not None
        self.launch = ready.bound({"y": 0, "x": 1}, 0)
        assert self.launch.__module__ == driver_launch.__name__

    def again(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        self.launch([y, x], [y.data_ptr(), x.data_ptr()])
        return y


@pytest.fixture
def on_gpu() -> Scaled:
    return Scaled(torch.randn(1000, device="cuda"))


@pytest.mark.gpu
def test_the_driver_computes_what_triton_s_launch_does(on_gpu: Scaled) -> None:
    for _ in range(3):
        x = torch.randn(1000, device="cuda")
        torch.testing.assert_close(on_gpu.again(x), x * 1.5 - 2)


@pytest.mark.gpu
def test_a_launch_is_on_the_current_stream_and_captured(on_gpu: Scaled) -> None:
    x, stream = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(4)
        y = on_gpu.again(x)
    stream.synchronize()
    assert torch.equal(y, torch.full_like(y, 4.0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = on_gpu.again(x)
    x.fill_(8)
    graph.replay()
    assert torch.equal(captured, torch.full_like(captured, 10.0))


@pytest.mark.gpu
def test_a_thread_that_has_not_used_the_gpu_launches(on_gpu: Scaled) -> None:
    x, y = torch.full((1000,), 6.0, device="cuda"), torch.empty(1000, device="cuda")
    addresses = [y.data_ptr(), x.data_ptr()]
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: on_gpu.launch([y, x], addresses))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, 7.0))


@pytest.mark.gpu
def test_profilers_name_the_kernel(on_gpu: Scaled) -> None:
    x = torch.randn(1000, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        on_gpu.again(x)
        torch.cuda.synchronize()
    assert any("scaled" in event.key for event in profile.key_averages())


@pytest.mark.gpu
def test_a_replay_launches_by_the_driver() -> None:
    x = torch.randn(256, device="cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    same = CallCache(device=device)
    y = same.empty("y", lambda: torch.empty_like(x))
    numbers = {"n": 256, "factor": 1.5, "some": -2, "BLOCK": 128}
    given = Arguments(grid=(2, 1, 1), tensors={"X": "x", "Absent": None, "Y": "y"}, numbers=numbers)
    same.keep([launching.launch(scaled, same, {"x": x, "y": y}, lambda: given)], inputs=("x",), returned=("y", "y"))
    assert same.replay is not None
    with mock.patch.object(launching, "start", never):
        found, _ = same.replay.run([x])
    torch.testing.assert_close(found, x * 1.5 - 2)
