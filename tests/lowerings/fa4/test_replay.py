"""What is recorded of a function, and that it is launched again with what a further call brings."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attn_compiler.lowerings.fa4 import replay
from attn_compiler.lowerings.fa4.replay import Recording, Tensors
from attn_compiler.lowerings.shared.launching import replaying
from attn_compiler.lowerings.shared.launching.on_device import Empty
from attn_compiler.lowerings.shared.launching.replaying import Replay, Returned, replay_of


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "current_cuda_device", lambda: -1)


class Pair(NamedTuple):
    first: Tensor | None
    second: Tensor | None


def function(body: Callable[..., None], kernel: Callable[..., None]) -> Any:
    """One of flash_attn's: `body(launch, ...)`; launch runs the kernel out of the function's cache."""

    def opaque(*arguments: Any) -> None:
        with _disable_current_modes():
            kernel(*arguments)

    def call(*arguments: Any) -> Any:
        return body(lambda *given: call.compile_cache["key"](*given), *arguments)  # type: ignore[attr-defined]

    call.compile_cache = {"key": opaque}  # type: ignore[attr-defined]
    return call


def recorded(called: Any, given: dict[str, Tensor], results: tuple[str, ...] = ()) -> Recording | None:
    with replay.watching([called]) as watch:
        found = called(*given.values())
    return watch.recording(given, dict(zip(results, found or (), strict=True)))


def replayed(recording: Recording, inputs: tuple[str, ...], outputs: Tensors, returned: Returned) -> Replay:
    """outputs: what a call allocates besides, like these and filled with 0."""
    empties = {name: Empty.zeros_like(x) for name, x in outputs.items()} | recording.empties
    return replay_of(torch.device("cpu"), [recording], empties, inputs=inputs, returned=returned)


def test_launches_again_with_other_tensors_and_fresh_memory() -> None:
    def body(launch: Any, x: Tensor, out: Tensor) -> tuple[Tensor]:
        total, extra = torch.zeros(3), torch.empty(3)
        launch(x.detach(), total, 2.0, Pair(extra, None))
        launch(total, out, 1.0, Pair(None, None))
        return (extra,)

    def kernel(x: Tensor, out: Tensor, factor: float, pair: Pair) -> None:
        assert isinstance(pair, Pair)
        out += x * factor
        if pair.first is not None:
            pair.first.copy_(x)

    called = function(body, kernel)
    recording = recorded(called, {"x": torch.ones(3), "out": torch.zeros(3)}, ("extra",))
    assert recording is not None
    again = replayed(recording, ("x",), {"out": torch.zeros(3)}, ("out", "extra"))
    for value in (3.0, 5.0):
        out, extra = again.run([x := torch.full((3,), value)])
        assert out.tolist() == [2 * value] * 3
        assert extra.tolist() == [value] * 3
        assert extra.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(("drift", "alike"), [(0.0, True), (0.001, True), (0.5, False), (-0.5, False)])
def test_whether_a_replay_gives_what_the_function_gave(drift: float, alike: bool) -> None:
    runs: list[int] = []

    def kernel(x: Tensor, out: Tensor, extra: Tensor) -> None:
        out.copy_(x + drift * len(runs))
        extra.fill_(-torch.inf)
        runs.append(1)

    def body(launch: Any, x: Tensor, out: Tensor) -> tuple[Tensor]:
        extra = torch.empty(3)
        launch(x, out, extra)
        return (extra,)

    given = {"x": torch.ones(3), "out": torch.zeros(3)}
    with replay.watching([called := function(body, kernel)]) as watch:
        (extra,) = called(*given.values())
    recording = watch.recording(given, {"extra": extra})
    assert recording is not None
    again = replayed(recording, ("x",), {"out": given["out"]}, ("out", "extra"))
    assert replay.gives(again.run([given["x"]]), (given["out"], extra)) is alike
    assert given["out"].tolist() == [1.0] * 3


def test_what_is_not_launched_is_not_allocated_again() -> None:
    def body(launch: Any, x: Tensor) -> None:
        torch.empty(1 << 20)
        launch(x)

    recording = recorded(function(body, lambda x: None), {"x": torch.ones(3)})
    assert recording is not None
    assert not recording.made


@pytest.mark.parametrize(
    "prepared", [lambda x: x.clone(), lambda x: x + 1, lambda x: x.contiguous() if not x.is_contiguous() else x.mul(2)]
)
def test_what_computes_something_itself_is_not_replayed(prepared: Callable[[Tensor], Tensor]) -> None:
    called = function(lambda launch, x: launch(prepared(x)), lambda x: None)
    assert recorded(called, {"x": torch.ones(3)}) is None


def test_two_names_for_one_tensor_can_not_be_told_apart() -> None:
    x = torch.ones(3)
    called = function(lambda launch, x, y: launch(x, y), lambda x, y: None)
    assert recorded(called, {"x": x, "y": x.view(3)}) is None
    assert recorded(called, {"x": x, "y": x.clone()}) is not None


def test_tensors_from_elsewhere_can_not_be_replayed() -> None:
    kept = torch.ones(3)
    plain = function(lambda launch, x: launch(x, kept), lambda x, y: None)
    within = function(lambda launch, x: launch(x, Pair(kept, None)), lambda x, y: None)
    mixed = function(lambda launch, x: launch(x, (x, 1.0)), lambda x, y: None)
    for called in (plain, within, mixed):
        assert recorded(called, {"x": torch.ones(3)}) is None


def test_caches_are_put_back_also_after_an_error() -> None:
    def body(launch: Any, x: Tensor) -> None:
        raise RuntimeError("no kernel")

    called = function(body, lambda x: None)
    kept = called.compile_cache
    with pytest.raises(RuntimeError, match="no kernel"), replay.watching([called]):
        called(torch.ones(3))
    assert called.compile_cache is kept


def test_another_thread_s_launches_are_not_recorded() -> None:
    called = function(lambda launch, x: launch(x), lambda x: None)
    with replay.watching([called]) as watch:
        thread = threading.Thread(target=lambda: called(torch.ones(3)))
        thread.start()
        thread.join()
        assert not watch.launched
        called(torch.ones(3))
    assert len(watch.launched) == 1


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn-4")
def test_what_flash_attn_launches_is_what_is_replayed() -> None:
    """In a process of its own, without the assertions of flash_attn's that tensors are on a GPU."""
    command = [sys.executable, "-O", "-W", "ignore", "-m", "tests.lowerings.fa4.functions"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "launches are the same" in run.stdout


def test_sequences_come_before_heads_and_no_gradient_is_asked_for() -> None:
    """What is allocated between launches is handed on as it is."""
    seen: list[tuple[tuple[int, ...], bool]] = []

    def body(launch: Any, q: Tensor, out: Tensor, lse: Tensor) -> None:
        launch(q, out, lse, torch.empty(1, 2, 3, 4))

    def kernel(*tensors: Tensor) -> None:
        seen.append(tuple((tuple(x.shape), x.requires_grad) for x in tensors))

    given = {"q": torch.ones(1, 5, 2, 4), "out": torch.ones(1, 5, 2, 4), "lse": torch.ones(1, 2, 5)}
    recording = recorded(function(body, kernel), given)
    assert recording is not None
    q = torch.ones(1, 2, 5, 4, requires_grad=True)
    again = replayed(recording, ("q",), {"out": torch.ones(1, 2, 5, 4), "lse": given["lse"]}, ("out", None))
    assert again.run([q])[0].shape == q.shape
    assert seen[1] == seen[0]
