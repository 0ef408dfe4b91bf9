from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from attn_compiler.lowerings.cudnn import frontend as cudnn_frontend
from attn_compiler.lowerings.cudnn.graphs import BuiltPlan
from attn_compiler.reasons.errors import CudnnRefused
from attn_compiler.torch_private import compat as torch_compat
from tests.lowerings.cudnn.recording_frontend import Frontend, NewerFrontend
from tests.lowerings.cudnn.test_graphs import backward_key, forward_key


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frontend]:
    """The module `cudnn` is a recording one, torch runs with its cuDNN, and stream 11 is current everywhere."""
    recording = Frontend()
    monkeypatch.setitem(sys.modules, "cudnn", recording)  # type: ignore[arg-type]
    monkeypatch.setattr(cudnn_frontend, "cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn_frontend, "_handles", threading.local())
    monkeypatch.setattr(torch_compat, "current_raw_stream", lambda device: 11)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    cudnn_frontend.load.cache_clear()
    yield recording
    cudnn_frontend.load.cache_clear()


def test_torchs_own_cudnn_is_used(frontend: Frontend) -> None:
    assert cudnn_frontend.load() is frontend


def test_another_cudnn_than_torchs_is_refused(frontend: Frontend) -> None:
    frontend.version = 92100
    with pytest.raises(CudnnRefused, match=r"the frontend opened cuDNN 9.21.0, torch runs with 9.19.0"):
        cudnn_frontend.load()


@pytest.mark.parametrize("error", [ImportError("no module named cudnn"), OSError("libcudnn.so.9: cannot open")])
def test_a_frontend_that_can_not_be_loaded_is_refused_with_its_message(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(name: str) -> Any:
        raise error

    monkeypatch.setattr(cudnn_frontend.importlib, "import_module", broken)
    with pytest.raises(CudnnRefused, match=str(error)):
        cudnn_frontend.load()


def test_a_handle_is_made_once_and_its_stream_set_when_it_changes(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cudnn_frontend.handle(0)
    assert cudnn_frontend.handle(0) == first
    assert frontend.streams == [(first, 11)]
    other = cudnn_frontend.handle(1)
    assert other != first
    monkeypatch.setattr(torch_compat, "current_raw_stream", lambda device: 22)
    assert cudnn_frontend.handle(0) == first
    assert frontend.streams == [(first, 11), (other, 11), (first, 22)]


def test_threads_have_handles_of_their_own(frontend: Frontend) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(cudnn_frontend.handle(0))) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len({*found, cudnn_frontend.handle(0)}) == 4


def test_a_handle_that_can_not_be_made_is_a_refusal(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("cudaGetDeviceCount(&count) != cudaSuccess")

    monkeypatch.setattr(frontend, "create_handle", fail)
    with pytest.raises(CudnnRefused, match="cudaGetDeviceCount"):
        cudnn_frontend.build(forward_key())


def test_a_plan_is_built_with_the_handle(frontend: Frontend) -> None:
    plan = cudnn_frontend.build(forward_key())
    assert plan.graph.machine["handle"] == cudnn_frontend.handle(0)
    assert plan.milliseconds >= 0


def test_a_launch_gets_addresses_a_workspace_and_the_handle(frontend: Frontend) -> None:
    plan = cudnn_frontend.build(backward_key())
    cudnn_frontend.launcher(plan, torch.device("cpu", 0), lambda all: all[1:])([], [0, 1, 2, 3])
    ((addresses, workspace, handle),) = plan.graph.launches
    assert (addresses, handle) == ([1, 2, 3], cudnn_frontend.handle(0))
    assert workspace != 0


def test_of_a_newer_frontend_its_own_graphs_and_handles_are_taken(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of C++, whose handles are numbers; and an array of addresses."""
    newer = NewerFrontend()
    monkeypatch.setitem(sys.modules, "cudnn", newer)  # type: ignore[arg-type]
    plan = cudnn_frontend.build(backward_key())
    assert "out" in plan.order
    assert plan.graph is newer.inner.graphs[-1]
    cudnn_frontend.launcher(plan, torch.device("cpu", 0), lambda all: all[1:])([], [0, 1, 1 << 47, 3])
    ((addresses, workspace, handle),) = plan.graph.launches
    assert (addresses, handle) == ([1, 1 << 47, 3], cudnn_frontend.handle(0))
    assert workspace != 0
    assert newer.inner.streams == [(handle, 11)]
    assert frontend.graphs == []


@pytest.mark.parametrize(("is_late", "level"), [(False, logging.INFO), (True, logging.WARNING)])
def test_plans_are_told_and_counted(caplog: pytest.LogCaptureFixture, is_late: bool, level: int) -> None:
    before = dict(counters["attn_compiler"])
    plan = BuiltPlan(graph=None, order=(), workspace=0, engine="eng2", milliseconds=31.0)
    with caplog.at_level(logging.INFO, logger="attn_compiler"):
        cudnn_frontend.tell(forward_key(), plan, is_late)
    (record,) = caplog.records
    assert (record.levelno, "31 ms (forward, eng2)" in record.getMessage()) == (level, True)
    assert ("in the middle of a step" in record.getMessage()) == is_late
    now = counters["attn_compiler"]
    assert now["cudnn_plans"] == before.get("cudnn_plans", 0) + 1
    assert now["cudnn_plans_late"] == before.get("cudnn_plans_late", 0) + is_late
