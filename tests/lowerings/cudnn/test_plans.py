from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.cudnn import frontend as cudnn_frontend, graphs, plans as cudnn_plans
from attn_compiler.lowerings.cudnn.graphs import BuiltPlan, PlanKey, Plans
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.reasons.errors import CudnnRefused
from attn_compiler.spec.target import Target
from tests.lowerings.cudnn.recording_frontend import Frontend
from tests.lowerings.cudnn.test_lowering import TARGET, laid
from tests.lowerings.specs import bias, make_spec, refusal

CALL = CudnnCall(scale=0.125, right=0, needs_grad=True)


def build_on(devices: set[int], frontend: Frontend) -> Any:
    """Builds on these GPUs; the others have no kernel for anything."""

    def build(key: PlanKey) -> BuiltPlan:
        if key.device not in devices:
            raise CudnnRefused(said=f"nothing for cuda:{key.device}")
        return graphs.build(frontend, key, lambda: 0.0)

    return build


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Frontend:
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


def test_plans_are_built_for_the_gpu_that_the_tensors_are_on(frontend: Frontend) -> None:
    plans = cudnn_plans.built(CALL, values("cuda:0"), TARGET)
    assert [("dO" in plan.graph.told) for plan in plans] == [False, True]
    assert cudnn_plans.built(dataclasses.replace(CALL, needs_grad=False), values("cuda:0"), TARGET)[0].order == (
        *"qkv",
        "out",
    )


def test_a_gpu_of_another_kind_is_found_out_while_compiling(frontend: Frontend) -> None:
    with pytest.raises(CudnnRefused, match="nothing for cuda:1"):
        cudnn_plans.built(CALL, values("cuda:1"), TARGET)


def test_nothing_is_built_for_a_made_up_machine_or_off_a_gpu(frontend: Frontend) -> None:
    assert cudnn_plans.built(CALL, values("cuda:0"), Target.fake()) == ()
    assert cudnn_plans.built(CALL, values("cpu"), TARGET) == ()
    assert frontend.graphs == []


def test_this_machine_is_what_the_target_was_made_from() -> None:
    assert not cudnn_plans._is_here(Target.fake())
    assert cudnn_plans._is_here(Target.current("cuda")) == torch.cuda.is_available()


@pytest.mark.parametrize("shape", [(1, 8, 128, 128), (8, 128, 128), (128, 128), (2, 1, 128, 1)])
def test_a_bias_is_planned_as_it_will_be_made(frontend: Frontend, shape: tuple[int, ...]) -> None:
    """Contiguous, of four axes, with all keys: as cudnn_operands makes it."""
    spec = laid(make_spec(changes=(bias(*shape),)))
    assert refusal(by_name("cudnn"), spec, TARGET) == []
    planned = frontend.graphs[0].named(graphs.UIDS)["bias"]
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
