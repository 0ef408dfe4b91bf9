"""Calls of linear attention, written into graphs, one step at a time too."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from attn_compiler.lowerings.graph_ops import linear_call
from attn_compiler.lowerings.graph_ops.linear_recurrence import definition
from attn_compiler.lowerings.linear.triton_op import LinearTriton
from attn_compiler.options.options import Options
from attn_compiler.passes.pipeline import rewriting
from attn_compiler.passes.writing import linear_calls
from attn_compiler.reasons.errors import AttnCompilerWarning, PassFailed
from attn_compiler.reporting.dump import Dumper
from attn_compiler.reporting.facts import LinearReport
from attn_compiler.spec.linear import LinearForm
from tests.lowerings.linear import linear_forms
from tests.lowerings.linear.triton_problems import FORMS, problem

# A lowering in the place of a call, the model's own function back, and rows for the report.
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


def _lower(gm: fx.GraphModule, options: Options) -> tuple[LinearReport, ...]:
    return linear_calls.lower(gm, options, {}, Dumper(directory=None, traced=False))


def _targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if "linear_" in str(node.target)]


def test_a_lowering_takes_the_place_of_each_call() -> None:
    gm, given = _graph()
    wanted = gm(*given)
    assert linear_calls.are_in(gm)
    (row,) = _lower(gm, _NAMED)
    gm.recompile()
    assert _targets(gm) == ["attn_compiler.linear_reference.default"] * 2
    assert not linear_calls.are_in(gm)
    torch.testing.assert_close(gm(*given), wanted, rtol=1e-4, atol=1e-5)
    assert row.modules == ("layers.0", "layers.1")
    assert (row.decision.lowering, row.spec.words) == (
        "linear_reference",
        "gated delta rule, 4 heads of 5/7, 2 of q and k, decay a head, with a state",
    )
    assert row.function == "models:delta"


def test_the_precision_that_the_user_asked_for_is_that_of_our_kernels_alone() -> None:
    for lowering, precision in (("linear_triton", "fla"), ("linear_reference", "exact")):
        gm, _ = _graph()
        (row,) = _lower(gm, Options(lowering=lowering, linear_precision="fla"))
        (call, *_) = [node for node in gm.graph.nodes if str(node.target) == f"attn_compiler.{lowering}.default"]
        assert LinearForm.from_text(call.args[1]).precision == row.spec.form.precision == precision
        # In float32 there is one precision.
        assert "fla" not in row.spec.words
        told = dataclasses.replace(row.spec, dtype="bfloat16").words
        assert told.endswith(", as exact as fla") == (precision == "fla")


def test_a_call_without_a_lowering_is_the_model_own_function() -> None:
    gm, given = _graph()
    wanted = gm(*given)
    (row,) = _lower(gm, Options(lowering="untouched"))
    gm.recompile()
    assert row.decision.lowering == "untouched"
    assert _targets(gm) == ["attn_compiler.linear_own.default"] * 2
    torch.testing.assert_close(gm(*given), wanted)


def test_a_graph_that_is_given_back_has_the_model_own_functions() -> None:
    gm, _ = _graph()
    linear_calls.give_back(gm)
    assert _targets(gm) == ["attn_compiler.linear_own.default"] * 2


def test_what_fails_gives_the_model_own_functions_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Iterator[None]:
        raise RuntimeError("no luck")

    monkeypatch.setattr(linear_calls, "lower", failing)
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
    _lower(gm, _NAMED)
    gm.recompile()
    given = [x.detach().requires_grad_() for x in given]
    grads = torch.autograd.grad(gm(*given).sum(), given, allow_unused=True)
    assert [grad is None for grad in grads] == [True, *(False for _ in given[1:])]


# A cache's state is written in place where the graph does nothing else with it, and nowhere else.
_FORM = FORMS["delta"]
_OP = LinearTriton().step_op

Build = Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], tuple[fx.Node, ...]]


def _steps(
    build: Build, change: Callable[[Tensor], Tensor] = lambda state: state, form: LinearForm = _FORM
) -> tuple[fx.GraphModule, list[Tensor]]:
    """A call of one token. build: adds what is done with the state, the result and the new state, and gives what the graph returns."""
    given = [x.detach() for x in problem(form, (1, 2, 4, 16, 16))]
    given[-1] = change(given[-1])
    mode, graph = FakeTensorMode(), fx.Graph()
    operands = []
    for place, x in enumerate(given):
        operands.append(graph.placeholder(f"x{place}"))
        operands[-1].meta["example_value"] = mode.from_tensor(x)
    call = graph.call_function(linear_call.linear_call, (list(operands), form.text))
    call.meta["example_value"] = linear_call.fake([x.meta["example_value"] for x in operands], form.text)
    out, last = (graph.call_function(operator.getitem, (call, at)) for at in (0, 1))
    graph.output(build(graph, operands[-1], out, last))
    return fx.GraphModule(torch.nn.Module(), graph), given


def _is_written_over(gm: fx.GraphModule, *, needs_grad: bool = False) -> bool:
    (node,) = linear_call.calls(gm.graph)
    spec = linear_forms.spec(_FORM, length=1, needs_grad=needs_grad)
    found = linear_calls.write_over(node, spec, _OP, linear_calls.shared_memory(gm.graph))
    gm.recompile()
    return found


def _cached(graph: fx.Graph, state: fx.Node, out: fx.Node, last: fx.Node) -> tuple[fx.Node, ...]:
    """As a cache does, and what it gives back is read."""
    copied = graph.call_method("copy_", (state, last))
    return out, graph.call_method("mul", (copied, 2)), graph.call_method("add", (state, 1))


def test_a_state_that_a_cache_takes_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, given = _steps(_cached)
    assert _is_written_over(gm)
    gm.graph.lint()
    assert [str(node.target) for node in gm.graph.nodes if "linear" in str(node.target)] == [str(_OP)]
    assert "copy_" not in gm.code
    state = given[-1].clone()
    wanted, last = torch.ops.attn_compiler.linear_triton([*given[:-1], state], _FORM.text)
    found = gm(*given)
    torch.testing.assert_close(found, (wanted, last * 2, last + 1))
    torch.testing.assert_close(given[-1], last)


def _read_before(graph: fx.Graph, state: fx.Node, out: fx.Node, last: fx.Node) -> tuple[fx.Node, ...]:
    """A view that may be read after the call."""
    with graph.inserting_before(out.args[0]):  # type: ignore[arg-type]
        view = graph.call_method("view", (state, -1))
    read = graph.call_method("sum", (view,))
    graph.call_method("copy_", (state, last))
    return out, read


def _read_between(graph: fx.Graph, state: fx.Node, out: fx.Node, last: fx.Node) -> tuple[fx.Node, ...]:
    read = graph.call_method("sum", (state,))
    graph.call_method("copy_", (state, last))
    return out, read


def _given_back(graph: fx.Graph, state: fx.Node, out: fx.Node, last: fx.Node) -> tuple[fx.Node, ...]:
    graph.call_method("copy_", (state, last))
    return out, last


def _added(graph: fx.Graph, state: fx.Node, out: fx.Node, last: fx.Node) -> tuple[fx.Node, ...]:
    return out, graph.call_method("add_", (state, last))


def _elsewhere(graph: fx.Graph, state: fx.Node, out: fx.Node, last: fx.Node) -> tuple[fx.Node, ...]:
    return out, graph.call_method("copy_", (graph.call_method("clone", (state,)), last))


def _not_kept(graph: fx.Graph, state: fx.Node, out: fx.Node, last: fx.Node) -> tuple[fx.Node, ...]:
    return out, last


@pytest.mark.parametrize("build", [_read_before, _read_between, _given_back, _added, _elsewhere, _not_kept])
def test_a_state_that_is_read_otherwise_is_not(build: Build) -> None:
    gm, _ = _steps(build)
    before = gm.code
    assert not _is_written_over(gm)
    assert gm.code == before


@pytest.mark.parametrize(
    "change",
    [Tensor.bfloat16, lambda state: state.mT.contiguous().mT, lambda state: state[:1].expand(2, -1, -1, -1)],
    ids=["half", "transposed", "expanded"],
)
def test_nor_is_a_state_that_lies_otherwise(change: Callable[[Tensor], Tensor]) -> None:
    assert not _is_written_over(_steps(_cached, change)[0])


def test_nor_is_one_that_a_backward_reads() -> None:
    assert not _is_written_over(_steps(_cached)[0], needs_grad=True)


def test_nor_is_one_that_another_operand_is() -> None:
    gm, _ = _steps(_cached)
    (node,) = linear_call.calls(gm.graph)
    operands = list(node.args[0])  # type: ignore[arg-type]
    node.args = ([operands[-1], *operands[1:]], node.args[1])
    assert not _is_written_over(gm)


@pytest.mark.parametrize("view", [Tensor.detach, lambda state: state[:1], lambda state: state.view(-1)[1:]])
def test_nor_is_one_in_the_memory_of_another_input(view: Callable[[Tensor], Tensor]) -> None:
    """What the model reads between the call and the copy through that input is the old state."""

    def build(graph: fx.Graph, state: fx.Node, out: fx.Node, last: fx.Node) -> tuple[fx.Node, ...]:
        with graph.inserting_before(next(iter(graph.nodes))):
            other = graph.placeholder("other")
        value = state.meta["example_value"]
        with value.fake_mode:
            other.meta["example_value"] = view(value)
        read = graph.call_method("sum", (other,))
        return out, read, graph.call_method("copy_", (state, last))

    assert not _is_written_over(_steps(build)[0])
