from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_compiler.index_expr import Const
from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.cudnn import frontend as cudnn_frontend, graphs, limits, plan, plans as cudnn_plans
from attn_compiler.lowerings.cudnn.graphs import Plans
from attn_compiler.lowerings.cudnn.plan import CudnnCall
from attn_compiler.options.options import Options
from attn_compiler.passes.writing import select
from attn_compiler.reasons.codes import Code
from attn_compiler.reasons.decisions import Reason
from attn_compiler.spec.attention import AttentionSpec, TensorSpec
from attn_compiler.spec.masks import CausalFrom, Dense, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests.lowerings.cudnn.recording_frontend import Frontend, NotSupported
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, bias, dense, make_spec, refusal, words

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


def window(left: int, right: int | None = None, *, queries: int = 128, keys: int = 128) -> MaskSpec:
    shape = (1, 1, queries, keys)
    return MaskSpec(kinds=(SlidingWindow(left=left, right=right),), dense=Dense(shape=shape, dtype="bool"))


# ---- machines ---------------------------------------------------------------------------------------------------------


def test_the_frontend_has_to_be_installed_in_a_version_that_is_known() -> None:
    assert "nvidia-cudnn-frontend from 1.22 to before 1.33; observed not installed; pip install" in why_not(
        Target.fake()
    )
    for version, taken in (
        ("1.21.0", False),
        ("1.22.0", True),
        ("1.23.0", True),
        ("1.27.0", True),
        ("1.32.0", True),
        ("1.33.0", False),
    ):
        assert (why_not(Target.fake(cudnn_frontend=version)) == "") == taken


@pytest.mark.parametrize("version", ["1.24.1", "1.25.0", "1.26.2"])
def test_what_a_frontend_tells_cudnn_has_to_be_known_to_it(version: str) -> None:
    """By the version of the cuDNN that is installed."""
    said = why_not(Target.fake(cudnn_frontend=version, cudnn=92_100))
    assert f"cuDNN 9.22.0 or newer, which knows their reshape mode; observed {version}, cuDNN 9.21.0" in said
    assert "pip install 'nvidia-cudnn-frontend==1.27.*'" in said
    assert why_not(Target.fake(cudnn_frontend=version, cudnn=92_200)) == ""


@pytest.mark.parametrize(
    ("changes", "observed"),
    [
        ({"device": "cpu"}, "device cpu"),
        ({"sm": 75}, "sm75"),
        ({"cudnn": 0}, "none"),
        ({"cudnn": 91_200}, "9.12.0"),
        ({"disabled": frozenset({"cudnn"})}, "switched off"),
    ],
)
def test_machines_that_it_can_not_run_on(changes: dict[str, Any], observed: str) -> None:
    target = Target.fake(**{"cudnn_frontend": "1.22.1", **changes})
    assert observed in words(by_name("cudnn").unavailable(target))


# ---- sites ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": CAUSAL},
        {"mask": BOTTOM_RIGHT, "seqlen_q": 128, "seqlen_kv": 256},
        {"mask": window(40)},
        {"mask": window(40, 7)},
        {"changes": (Sinks(requires_grad=True),)},
        {"changes": (bias(1, 8, 128, 128),)},
        {"mask": dense(2, 1, 128, 128, dtype="bfloat16")},
        {"seqlen_q": 192, "seqlen_kv": 192},
        {"heads": 8, "heads_kv": 2},
        {"heads": 16, "heads_kv": 1},
        {"head_dim": 192, "head_dim_v": 128},
        {"head_dim": 96, "head_dim_v": 64},
        {"head_dim": 256},
        {"dtype": "float16"},
        {"dropout_p": 0.125},
        {"seqlen_q": 1, "needs_grad": False},
    ],
)
def test_sites_that_it_serves(changes: dict[str, Any]) -> None:
    assert why_not(**changes) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"changes": (Softcap(cap=50.0),)}, "no softcap"),
        ({"mask": dense(1, 1, 128, 128)}, "a mask tensor of truth values"),
        ({"dtype": "float32"}, "q is float16 or bfloat16"),
        ({"head_dim": 60}, "head_dim_qk is a multiple of 8"),
        ({"head_dim": 264}, "head_dim_qk is at most 256"),
        ({"scale": -0.1}, "the scale is positive"),
        ({"dropout_p": 0.1}, "dropout is a multiple of 1/16"),
        ({"returns_weights": True}, "attention weights have no other reader"),
        ({"mask": BOTTOM_RIGHT, "seqlen_q": 256, "seqlen_kv": 128}, "no more queries than keys"),
        ({"mask": window(40, queries=256), "seqlen_q": 256}, "no more queries than keys"),
        (
            {"mask": BOTTOM_RIGHT, "seqlen_kv": 256, "changes": (bias(1, 8, 128, 256),)},
            "with a diagonal from the bottom right, no bias",
        ),
        ({"mask": BOTTOM_RIGHT, "seqlen_kv": 256, "dropout_p": 0.125}, "no lengths and no dropout"),
        (
            {
                "mask": MaskSpec(
                    kinds=(CausalFrom(offset=Const(-1)),), dense=Dense(shape=(1, 1, 128, 128), dtype="bool")
                )
            },
            "a query may use the key at its own position; observed strictly causal",
        ),
        (
            {"changes": (Sinks(requires_grad=False),), "seqlen_q": 1, "needs_grad": False},
            "with sinks, more than one query",
        ),
        ({"mask": dense(1, 1, 128, 128, dtype="float32")}, "the mask is bool or bfloat16"),
        ({"mask": dense(2, 1, 1, 128, dtype="bfloat16")}, "a bias has a row for each query"),
        ({"mask": dense(128, dtype="bfloat16")}, "a bias has a row for each query"),
    ],
)
def test_sites_that_it_refuses(changes: dict[str, Any], expected: str) -> None:
    assert expected in why_not(**changes)


@pytest.mark.parametrize("changes", [{"seqlen_q": "s0", "seqlen_kv": "s0"}, {"batch": "s0"}])
def test_unknown_sizes_are_refused_rather_than_planned_for_in_a_step(changes: dict[str, Any]) -> None:
    reasons = why_not(**changes)
    assert "every size and stride is known: a plan serves one shape" in reasons
    assert "observed q (" in reasons
    assert "compile with dynamic=False" in reasons


def test_a_deterministic_backward_takes_memory_for_all_scores() -> None:
    target = dataclasses.replace(TARGET, deterministic=True)
    sizes = {"batch": 8, "heads": 32, "heads_kv": 32, "seqlen_q": 2048, "seqlen_kv": 2048}
    assert why_not(target, **sizes) == ""
    more = {**sizes, "seqlen_q": 2112, "mask": CAUSAL}
    assert "a deterministic backward takes at most 2048 MiB for all scores; observed 2112 MiB" in why_not(
        target, **more
    )
    assert why_not(target, **more, needs_grad=False) == ""
    assert why_not(**more) == ""


def test_a_bias_with_gradient_takes_it_too() -> None:
    sizes = {"batch": 8, "heads": 32, "heads_kv": 32, "seqlen_q": 4096, "seqlen_kv": 4096}
    assert "a bias with gradient takes at most" in why_not(**sizes, changes=(bias(1, 32, 4096, 4096),))
    assert why_not(**sizes, changes=(bias(1, 32, 4096, 4096, requires_grad=False),)) == ""


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
