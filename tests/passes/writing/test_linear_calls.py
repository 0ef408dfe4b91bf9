"""A lowering in the place of a call, the model's own function back, and rows for the report."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.lowerings.graph_ops import linear_call
from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.options.options import Options
from attn_compiler.passes.pipeline import rewriting, steps
from attn_compiler.passes.writing import linear_calls
from attn_compiler.reasons.errors import AttnCompilerWarning, PassFailed
from tests.lowerings.linear import linear_forms

_NAMED = Options(lowering="linear_reference")


@pytest.fixture(autouse=True)
def _functions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {form.function: definition for form, _ in linear_forms.problems(length=1)}
    monkeypatch.setattr(linear_call, "FUNCTIONS", known)


def _graph(layers: int = 2) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Layers that read the same operands, as Dynamo has them."""
    (form, given), *_ = linear_forms.problems(length=10)
    mode = FakeTensorMode()
    graph = fx.Graph()
    operands = []
    for place, x in enumerate(given):
        node = graph.placeholder(f"x{place}")
        node.meta["example_value"] = mode.from_tensor(x)
        operands.append(node)
    outs = []
    for layer in range(layers):
        call = graph.call_function(linear_call.linear_call, (list(operands), form.text))
        call.meta["example_value"] = linear_call.fake([x.meta["example_value"] for x in operands], form.text)
        call.meta["nn_module_stack"] = {"self": (f"L['self'].layers.{layer}", torch.nn.Module)}
        outs.append(graph.call_function(_first, (call,)))
    graph.output(tuple(outs))
    return fx.GraphModule(torch.nn.Module(), graph), given


def _first(pair: Any) -> Any:
    return pair[0]


def _targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if "linear_" in str(node.target)]


def test_a_lowering_takes_the_place_of_each_call() -> None:
    gm, given = _graph()
    wanted = gm(*given)
    assert linear_calls.are_in(gm)
    sites = linear_calls.lower(gm, _NAMED)
    gm.recompile()
    assert _targets(gm) == ["attn_compiler.linear_reference.default"] * 2
    assert not linear_calls.are_in(gm)
    torch.testing.assert_close(gm(*given), wanted, rtol=1e-4, atol=1e-5)
    (row,) = linear_calls.rows(sites)
    assert row.modules == ("layers.0", "layers.1")
    assert (row.decision.lowering, row.spec.words) == (
        "linear_reference",
        "gated delta rule, 4 heads of 5/7, 2 of q and k, decay a head, with a state",
    )
    assert row.function == "models:delta"


def test_a_call_without_a_lowering_is_the_model_own_function() -> None:
    gm, given = _graph()
    wanted = gm(*given)
    (site, _) = linear_calls.lower(gm, Options(lowering="untouched"))
    gm.recompile()
    assert site.decision.lowering == "untouched"
    assert _targets(gm) == ["attn_compiler.linear_own.default"] * 2
    torch.testing.assert_close(gm(*given), wanted)


def test_a_graph_that_is_given_back_has_the_model_own_functions() -> None:
    gm, _ = _graph()
    linear_calls.give_back(gm)
    assert _targets(gm) == ["attn_compiler.linear_own.default"] * 2


def test_what_fails_gives_the_model_own_functions_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Iterator[None]:
        raise RuntimeError("no luck")

    monkeypatch.setattr(steps.linear_calls, "lower", failing)
    gm, given = _graph()
    wanted = gm(*given)
    with pytest.warns(AttnCompilerWarning, match="no luck"):
        rewritten = rewriting.rewrite(gm, Options())
    assert rewritten.failed
    assert _targets(gm) == ["attn_compiler.linear_own.default"] * 2
    torch.testing.assert_close(gm(*given), wanted)
    gm, _ = _graph()
    with pytest.raises(PassFailed, match="no luck"):
        rewriting.rewrite(gm, Options(strict=True))
    assert _targets(gm) == ["attn_compiler.linear_own.default"] * 2


def test_what_the_compiler_refuses_is_taken_back() -> None:
    gm, _ = _graph()
    rewritten = rewriting.rewrite(gm, _NAMED)
    assert rewritten.report.num_linear == 2
    assert _targets(gm) == ["attn_compiler.linear_reference.default"] * 2
    rewritten.take_back(gm)
    assert _targets(gm) == ["attn_compiler.linear_own.default"] * 2


def test_where_the_state_alone_is_read_q_has_no_gradient() -> None:
    gm, given = _graph(layers=1)
    (output,) = gm.graph.find_nodes(op="output")
    (call,) = linear_call.calls(gm.graph)
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(operator.getitem, (call, 1)),)
    gm.graph.eliminate_dead_code()
    linear_calls.lower(gm, _NAMED)
    gm.recompile()
    given = [x.detach().requires_grad_() for x in given]
    grads = torch.autograd.grad(gm(*given).sum(), given, allow_unused=True)
    assert [grad is None for grad in grads] == [True, *(False for _ in given[1:])]
