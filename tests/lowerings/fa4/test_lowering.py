"""The FlashAttention-4 lowering without its kernels: what it takes, what it refuses and why, what it puts into the graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_compiler.lowerings import by_name
from attn_compiler.lowerings.fa4.lowering import FlashAttention4
from attn_compiler.lowerings.fa4.plan import Fa4Call
from attn_compiler.spec.target import Target
from tests import numerics
from tests.lowerings import emitting
from tests.lowerings.fa4.cases import PROBLEMS, VERSION, Problem, inputs
from tests.lowerings.fa4.stand_in import StandIn, flash  # noqa: F401 - a fixture

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
