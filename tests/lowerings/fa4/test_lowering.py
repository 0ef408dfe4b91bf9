"""What flash_attn 4 is asked for: limits, plans, and the ops around its calls."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.fa4 import limits, ops as fa4_ops, plan
from attn_compiler.lowerings.fa4.lowering import FlashAttention4
from attn_compiler.lowerings.fa4.plan import Fa4Call
from attn_compiler.spec.masks import Causal, Dense, MaskSpec, SlidingWindow
from attn_compiler.spec.scores import Sinks, Softcap
from attn_compiler.spec.target import Target
from tests import numerics
from tests.lowerings import emitting
from tests.lowerings.fa4.cases import PROBLEMS, VERSION, Problem, inputs
from tests.lowerings.fa4.stand_in import StandIn, flash  # noqa: F401 - a fixture
from tests.lowerings.specs import BOTTOM_RIGHT, CAUSAL, make_spec

# The FlashAttention-4 lowering without its kernels.
H200 = Target.fake(flash_attn_4=VERSION)
FA4 = FlashAttention4()
BY_NAME = {problem.name: problem for problem in PROBLEMS}


# ---- the machine --------------------------------------------------------------------------------------------------


# ---- what it takes ------------------------------------------------------------------------------------------------


# ---- the graph ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window_gqa_sinks", "causal_bfloat16", "softcap_wide"])
def test_the_graph_is_the_attention_that_was_asked_for(name: str, flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME[name], device="cpu")
    module = emitting.emit(FA4, built)
    assert emitting.calls(module)[0] is torch.ops.attn_compiler.fa4.default
    given = emitting.arguments(built)
    numerics.assert_within_rule(numerics.with_gradients(lambda _: module(*given), built), built)


def test_the_decision_is_in_the_text() -> None:
    graph = torch.fx.Graph()
    target = dataclasses.replace(H200, deterministic=True)
    emitter = emitting.GraphEmitter(graph, target)
    built = inputs(Problem(name="", case=BY_NAME["causal_bfloat16"].case), device="cpu")
    nodes = {name: graph.placeholder(name) for name in "qkv"}
    for name, node in nodes.items():
        node.meta["example_value"] = getattr(built, name).detach().to("meta")
    out = FA4.emit(emitter, FA4.plan(built.spec, emitter.target), emitting.Operands(**nodes))
    call = Fa4Call.from_text(out.args[0].args[-1])  # type: ignore[union-attr, arg-type]
    assert call == Fa4Call(spec=built.spec, version=VERSION, sm=90, deterministic=True)


@pytest.mark.parametrize(("dtype", "casts"), [(torch.float64, 1), (torch.float32, 0), (torch.bfloat16, 0)])
def test_sinks_in_double_precision_are_cast(dtype: torch.dtype, casts: int) -> None:
    built = inputs(BY_NAME["sinks_full"], device="cpu")
    assert built.sinks is not None
    module = emitting.emit(FA4, dataclasses.replace(built, sinks=built.sinks.detach().to(dtype)))
    assert emitting.calls(module).count(torch.Tensor.to) == casts


def test_it_is_registered() -> None:
    assert isinstance(by_name("fa4"), FlashAttention4)


# That the limits are those of the flash_attn that is installed, where one is.
def test_the_extra_names_the_versions_that_are_taken() -> None:
    import tomllib
    from pathlib import Path

    (wanted,) = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["fa4"]
    assert wanted == f"flash-attn-4>=4.0.0b{limits.FIRST_BETA},<4.0.0b{limits.LAST_BETA + 1}"


def test_functions_take_what_they_are_given() -> None:
    interface = pytest.importorskip("flash_attn.cute.interface", reason="needs flash-attn-4")
    forward, backward = (
        inspect.signature(getattr(interface, name)).parameters for name in ("_flash_attn_fwd", "_flash_attn_bwd")
    )
    shared = {"softmax_scale", "causal", "window_size_left", "window_size_right", "learnable_sink", "score_mod"}
    assert shared | {"out", "lse", "_arch"} <= set(forward)
    assert shared | {"deterministic", "dq", "dk", "dv", "dlse", "score_mod_bwd"} <= set(backward)


@pytest.mark.parametrize("version", ["", "4.0.0b3", "4.0.0b360", "4.0.0b36.post1", "3.0.0b36"])
def test_no_other_version_is_taken(version: str) -> None:
    assert limits.check_machine(Target.fake(flash_attn_4=version))


def windowed(left: int | None, right: int | None, *further: Causal) -> MaskSpec:
    window = SlidingWindow(left=left, right=right)
    return MaskSpec(kinds=(window, *further), dense=Dense(shape=(2, 1, 128, 128), dtype="bool"))


@pytest.mark.parametrize(
    ("mask", "causal", "window"),
    [
        (MaskSpec(), False, (None, None)),
        (CAUSAL, True, (None, None)),
        (BOTTOM_RIGHT, True, (None, None)),
        (windowed(31, None, Causal()), False, (31, 0)),
        (windowed(31, 16), False, (31, 16)),
        (windowed(None, 0), True, (None, None)),
        (windowed(None, 5), False, (None, 5)),
        (windowed(31, None), False, (31, None)),
        # Beyond every key.
        (windowed(127, None, Causal()), True, (None, None)),
        (windowed(126, None, Causal()), False, (126, 0)),
        (windowed(4096, 127), False, (None, None)),
    ],
)
def test_masks(mask: MaskSpec, causal: bool, window: tuple[int | None, int | None]) -> None:
    settings = plan.settings_of(make_spec(mask=mask))
    assert (settings.causal, settings.window) == (causal, window)


def test_a_window_stays_where_lengths_are_not_known() -> None:
    settings = plan.settings_of(make_spec(mask=windowed(4096, None, Causal()), seqlen_q="s0", seqlen_kv="s0"))
    assert settings.window == (4096, 0)


@pytest.mark.parametrize(
    ("learned", "training", "grad"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_scores(learned: bool, training: bool, grad: bool) -> None:
    spec = make_spec(changes=(Softcap(cap=30.0), Sinks(requires_grad=learned)), scale=0.5, needs_grad=training)
    settings = plan.settings_of(spec)
    assert (settings.scale, settings.softcap, settings.sinks, settings.sinks_grad) == (0.5, 30.0, True, grad)
    assert not plan.settings_of(make_spec()).sinks


def test_text_and_back() -> None:
    call = Fa4Call(spec=make_spec(mask=windowed(31, 16)), version="4.0.0b36", sm=90, deterministic=True)
    assert Fa4Call.from_text(call.to_text()) == call
    for other in ({"version": "4.0.0b35"}, {"sm": 100}, {"deterministic": False}):
        assert dataclasses.replace(call, **other).to_text() != call.to_text()  # type: ignore[arg-type]


# The leaf op of FlashAttention-4 as PyTorch sees it, with a stand-in for the kernels.
NAMES = ["causal_bfloat16", "window_gqa_sinks"]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME[name], device="cpu")
    arguments = (built.q, built.k, built.v, built.operands, built.text())
    torch.library.opcheck(torch.ops.attn_compiler.fa4.default, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_the_backward(name: str, flash: StandIn) -> None:  # noqa: F811
    built = inputs(BY_NAME[name], device="cpu")
    given = [x.detach() for x in (built.q, built.k, built.v)]
    operands = [x.detach() for x in built.operands]
    out, lse = torch.ops.attn_compiler.fa4.default(*given, operands, built.text())
    arguments = (torch.ones_like(out), torch.zeros_like(lse), *given, operands, out, lse, built.text())
    torch.library.opcheck(torch.ops.attn_compiler.fa4_backward.default, arguments)


def test_operands_are_those_of_the_spec() -> None:
    plain, sinks = (inputs(BY_NAME[name], device="cpu") for name in NAMES)
    assert fa4_ops.differentiable([], plain.text()) == []
    assert fa4_ops.differentiable(sinks.operands, sinks.text()) == [True]
    with pytest.raises(ValueError, match="the spec has no operands; got 1"):
        fa4_ops.differentiable(sinks.operands, plain.text())
    with pytest.raises(ValueError, match="the spec has sinks; got 0"):
        fa4_ops.differentiable([], sinks.text())
