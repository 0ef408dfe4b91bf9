"""cuDNN's frontend: graphs are built once and kept."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.cudnn import frontend as cudnn_frontend, graphs, plans as cudnn_plans
from attn_compiler.lowerings.cudnn.graphs import BuiltPlan, PlanKey, Plans
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.reasons.errors import CudnnRefused
from attn_compiler.spec.target import Target
from attn_compiler.torch_private import compat as torch_compat
from tests.lowerings.cudnn.recording_frontend import Frontend, NewerFrontend
from tests.lowerings.cudnn.test_graphs import backward_key, forward_key
from tests.lowerings.cudnn.test_lowering import TARGET, laid
from tests.lowerings.specs import bias, make_spec, refusal


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


CALL = CudnnCall(scale=0.125, right=0, needs_grad=True)


def build_on(devices: set[int], frontend_built: Frontend) -> Any:
    """Builds on these GPUs; the others have no kernel for anything."""

    def build(key: PlanKey) -> BuiltPlan:
        if key.device not in devices:
            raise CudnnRefused(said=f"nothing for cuda:{key.device}")
        return graphs.build(frontend_built, key, lambda: 0.0)

    return build


@pytest.fixture
def frontend_built(monkeypatch: pytest.MonkeyPatch) -> Frontend:
    """As if TARGET were this machine, with a first GPU that cuDNN serves and a second one of another kind that it does not."""
    recording = Frontend()
    monkeypatch.setattr(cudnn_frontend, "PLANS", Plans(build_on({0}, recording)))
    monkeypatch.setattr(cudnn_plans, "_is_here", lambda target: target == TARGET)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return recording


def values(device: str) -> dict[str, torch.Tensor]:
    with FakeTensorMode():
        tensors = [torch.empty(2, 64, 4, 32, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(3)]
    return dict(zip("qkv", tensors, strict=True))


def test_plans_are_built_for_the_gpu_that_the_tensors_are_on(frontend_built: Frontend) -> None:
    plans = cudnn_plans.built(CALL, values("cuda:0"), TARGET)
    assert [("dO" in plan.graph.told) for plan in plans] == [False, True]
    assert cudnn_plans.built(dataclasses.replace(CALL, needs_grad=False), values("cuda:0"), TARGET)[0].order == (
        *"qkv",
        "out",
    )


def test_a_gpu_of_another_kind_is_found_out_while_compiling(frontend_built: Frontend) -> None:
    with pytest.raises(CudnnRefused, match="nothing for cuda:1"):
        cudnn_plans.built(CALL, values("cuda:1"), TARGET)


def test_nothing_is_built_for_a_made_up_machine_or_off_a_gpu(frontend_built: Frontend) -> None:
    assert cudnn_plans.built(CALL, values("cuda:0"), Target.fake()) == ()
    assert cudnn_plans.built(CALL, values("cpu"), TARGET) == ()
    assert frontend_built.graphs == []


def test_this_machine_is_what_the_target_was_made_from() -> None:
    assert not cudnn_plans._is_here(Target.fake())
    assert cudnn_plans._is_here(Target.current("cuda")) == torch.cuda.is_available()


@pytest.mark.parametrize("shape", [(1, 8, 128, 128), (8, 128, 128), (128, 128), (2, 1, 128, 1)])
def test_a_bias_is_planned_as_it_will_be_made(frontend_built: Frontend, shape: tuple[int, ...]) -> None:
    """Contiguous, of four axes, with all keys: as cudnn_operands makes it."""
    spec = laid(make_spec(changes=(bias(*shape),)))
    assert refusal(by_name("cudnn"), spec, TARGET) == []
    planned = frontend_built.graphs[0].named(graphs.UIDS)["bias"]
    full = (*(1,) * (4 - len(shape)), *shape[:-1], 128)
    assert planned.dim == list(full)
    assert planned.stride[3] == 1
    assert planned.stride[2] == 128


def test_a_note_says_what_runs() -> None:
    forward = BuiltPlan(graph=None, order=(), workspace=256, engine="eng2", milliseconds=1.0)
    backward = BuiltPlan(graph=None, order=(), workspace=3 * 2**19, engine="eng6", milliseconds=1.0)
    assert cudnn_plans.words((forward, backward)) == (
        "cuDNN's plans: forward eng2, 256 bytes of workspace; backward eng6, 1.5 MiB of workspace"
    )
    assert cudnn_plans.words((forward,)) == "cuDNN's plans: forward eng2, 256 bytes of workspace"
