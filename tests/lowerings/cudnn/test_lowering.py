from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.cudnn import frontend as cudnn_frontend, graphs, limits, plan, plans as cudnn_plans
from attn_compiler.lowerings.cudnn.graphs import Plans
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.target import Target
from tests.lowerings.cudnn.recording_frontend import Frontend, NotSupported
from tests.lowerings.specs import CAUSAL, bias, make_spec, refusal, words

TARGET = Target.fake(cudnn_frontend="1.22.1")


def laid(spec: AttentionSpec) -> AttentionSpec:
    """The spec with q, k and v as views of contiguous BSHD memory, where their sizes are known."""

    def strides(tensor: TensorSpec) -> TensorSpec:
        _, heads, seqlen, head_dim = tensor.shape
        if not (isinstance(heads, int) and isinstance(seqlen, int) and isinstance(head_dim, int)):
            return tensor
        return dataclasses.replace(tensor, strides=(seqlen * heads * head_dim, head_dim, heads * head_dim, 1))

    return dataclasses.replace(spec, q=strides(spec.q), k=strides(spec.k), v=strides(spec.v))


def why_not(target: Target = TARGET, **changes: Any) -> str:
    return words(by_name("cudnn").why_not(laid(make_spec(**changes)), target))


# ---- machines ---------------------------------------------------------------------------------------------------------


# ---- sites ------------------------------------------------------------------------------------------------------------


def test_the_demand_is_what_cudnn_can_not_read() -> None:
    spec = laid(make_spec())
    demand = by_name("cudnn").demand(spec)
    assert demand.broken_by(spec.q) is None
    assert demand.broken_by(dataclasses.replace(spec.k, strides=(64, 0, 64, 1))) is not None
    assert demand.broken_by(dataclasses.replace(spec.k, strides=(8192, 64, 1, 128))) is not None
    assert demand.broken_by(dataclasses.replace(spec.k, strides=(65 * 1028, 65, 65 * 8, 1))) is not None


# ---- plans while compiling --------------------------------------------------------------------------------------------


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Frontend:
    """As if TARGET were this machine, with a frontend that records."""
    recording = Frontend()
    plans = Plans(lambda key: graphs.build(recording, key, lambda: 0.0))
    monkeypatch.setattr(cudnn_frontend, "PLANS", plans)
    monkeypatch.setattr(cudnn_plans, "_is_here", lambda target: target == TARGET)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return recording


def refused(target: Target = TARGET, **changes: Any) -> str:
    return words(refusal(by_name("cudnn"), laid(make_spec(**changes)), target))


def test_the_rules_build_nothing(frontend: Frontend) -> None:
    assert why_not(mask=CAUSAL) == ""
    assert frontend.graphs == []


def test_what_would_be_chosen_has_its_plans_built(frontend: Frontend) -> None:
    assert refused(mask=CAUSAL) == ""
    assert ["dO" in graph.told for graph in frontend.graphs] == [False, True]
    assert refused(mask=CAUSAL, needs_grad=False) == ""
    assert len(frontend.graphs) == 3
    assert cudnn_frontend.PLANS.counts.late == 0


def test_a_made_up_machine_builds_nothing(frontend: Frontend) -> None:
    assert refused(dataclasses.replace(TARGET, torch="2.14.0"), mask=CAUSAL) == ""
    assert frontend.graphs == []


def test_cudnns_refusal_sends_the_site_on_with_its_message(frontend: Frontend) -> None:
    frontend.errors["check_support"] = NotSupported("no engine for this head dim")
    spec = laid(make_spec(mask=CAUSAL))
    decision = select.decide(spec, TARGET, Options(lowerings=("cudnn", "triton")))
    assert decision.lowering == "triton"
    (refusal,) = decision.refusals
    assert refusal.lowering == "cudnn"
    assert refusal.reasons == (
        Reason(code=Code.NO_PLAN, rule="cuDNN builds a plan", observed="no engine for this head dim"),
    )


def test_a_shape_that_fails_only_in_the_backward_is_caught(frontend: Frontend) -> None:
    frontend.errors["build_plans"] = RuntimeError("no backward here")
    frontend.only_backward = True
    assert "observed no backward here" in refused(mask=CAUSAL)
    assert refused(mask=CAUSAL, needs_grad=False) == ""


def test_copies_that_layout_will_make_are_planned_for(frontend: Frontend) -> None:
    spec = laid(make_spec())
    spec = dataclasses.replace(spec, k=dataclasses.replace(spec.k, strides=(64, 0, 64, 1)))
    assert refusal(by_name("cudnn"), spec, TARGET) == []
    k = frontend.graphs[0].named(graphs.UIDS)["k"]
    assert k.stride == [8 * 128 * 64, 128 * 64, 64, 1]


@pytest.mark.parametrize(
    ("changes", "target", "counted"),
    [
        ({"seqlen_q": 192, "seqlen_kv": 192}, TARGET, True),
        ({"seqlen_q": 192, "seqlen_kv": 192, "dropout_p": 0.125}, TARGET, True),
        ({"seqlen_q": 192, "seqlen_kv": 256, "changes": (bias(1, 8, 192, 256),)}, TARGET, True),
        ({"seqlen_q": 192, "seqlen_kv": 192, "needs_grad": False}, TARGET, False),
        ({"seqlen_q": 192, "seqlen_kv": 192, "mask": CAUSAL}, TARGET, False),
        ({"seqlen_q": 192, "seqlen_kv": 256}, TARGET, False),
        ({"seqlen_q": 192, "seqlen_kv": 192}, dataclasses.replace(TARGET, cudnn=92_600), False),
    ],
)
def test_keys_are_counted_where_cudnn_would_go_beyond_them(
    changes: dict[str, Any], target: Target, counted: bool
) -> None:
    spec = laid(make_spec(**changes))
    call = limits.counted(plan.of(spec, deterministic=False), spec, target)
    assert (call.lengths, call.counted, call.may_be_empty) == (counted, counted, False)
    assert by_name("cudnn").why_not(spec, target) == []


def test_the_call_of_a_site_is_what_its_text_says() -> None:
    spec = laid(make_spec(mask=CAUSAL))
    assert CudnnCall.from_text(plan.of(spec, deterministic=False).to_text()).right == 0
