from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from attn_compiler.options.options import Options
from attn_compiler.passes.rewrites import key
from attn_compiler.passes.rewrites.refusing import Unkeyed
from attn_compiler.torch_private import caches as torch_caches

MODE = FakeTensorMode()


def _graph(change: Callable[[fx.GraphModule], Any] | None = None) -> fx.GraphModule:
    """x, y -> (softmax(x · weight), body(y)), as Dynamo writes it."""
    body_graph = fx.Graph()
    body_graph.output((body_graph.call_method("cos", (body_graph.placeholder("z"),)),))
    body = fx.GraphModule(nn.Module(), body_graph)
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    product = graph.call_function(torch.mul, (x, graph.get_attr("weight")))
    softmax = graph.call_function(torch.softmax, (product,), {"dim": -1})
    wrap = graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("wrap_body_0"), y))
    graph.output((softmax, wrap))
    root = nn.Module()
    root.weight, root.wrap_body_0 = nn.Buffer(torch.tensor([0.5, 2.0])), body
    gm = fx.GraphModule(root, graph)
    for module in (gm, gm.wrap_body_0):
        for node in module.graph.nodes:
            if node.op != "output" and not (node.op == "get_attr" and "body" in str(node.target)):
                with MODE:
                    node.meta["example_value"] = torch.empty(2)
            node.meta["stack_trace"] = f'File "model.py", line 1, in forward\n    {node.name}'
            node.meta["nn_module_stack"] = {"140": ("L['self'].layer", nn.Module)}
    if change is not None:
        change(gm)
    return gm


def _node(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def _text(gm: fx.GraphModule, options: Options | None = None, known: Any = None) -> str:
    return key.of(gm, options or Options(), known).text


def _other_value(gm: fx.GraphModule) -> None:
    with MODE:
        _node(gm, "x").meta["example_value"] = torch.empty(2, dtype=torch.float64)


def _without_value(gm: fx.GraphModule) -> None:
    del _node(gm, "softmax").meta["example_value"]


def _other_body(gm: fx.GraphModule) -> None:
    _node(gm.wrap_body_0, "cos").target = "sin"


def _in_other_order(gm: fx.GraphModule) -> None:
    _node(gm, "wrap_body_0").append(_node(gm, "softmax"))


CHANGES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "function": lambda gm: setattr(_node(gm, "softmax"), "target", torch.log_softmax),
    "number": lambda gm: setattr(_node(gm, "softmax"), "kwargs", {"dim": 0}),
    "number's type": lambda gm: setattr(_node(gm, "softmax"), "kwargs", {"dim": -1.0}),
    "argument": lambda gm: setattr(_node(gm, "mul"), "args", (_node(gm, "y"), _node(gm, "weight"))),
    "name": lambda gm: setattr(_node(gm, "softmax"), "name", "attention"),
    "value": _other_value,
    "no value": _without_value,
    "an attribute's number": lambda gm: gm.weight.fill_(3.0),
    "an attribute's gradient": lambda gm: gm.weight.requires_grad_(),
    "an attribute's dtype": lambda gm: setattr(gm, "weight", nn.Buffer(torch.tensor([0.5, 2.0]).double())),
    "body": _other_body,
    "order": _in_other_order,
    "line": lambda gm: _node(gm, "mul").meta.update(stack_trace="elsewhere"),
    "module": lambda gm: _node(gm, "mul").meta.update(nn_module_stack={"140": ("L['self'].other", nn.Module)}),
}


def test_a_graph_has_one_key() -> None:
    # Dynamo's own key of a module is its address.
    other = _graph(lambda gm: _node(gm, "mul").meta.update(nn_module_stack={"7": ("L['self'].layer", nn.Linear)}))
    assert _text(_graph()) == _text(_graph()) == _text(other)


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_that_differs_has_another(change: str) -> None:
    assert _text(_graph(CHANGES[change])) != _text(_graph())


def test_what_else_is_known_and_asked_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        _text(_graph()),
        _text(_graph(), known=[None, ["causal"]]),
        _text(_graph(), Options(strict=True)),
        _text(_graph(), Options(lowering="math")),
    ]
    monkeypatch.setattr(torch_caches, "state", lambda devices: sorted(map(str, devices)))
    texts.append(_text(_graph()))
    assert len(set(texts)) == len(texts)
    same = (Options(verify=True), Options(dump_dir="x"), Options(check_invariants=False), Options(cache_rewrites=False))
    assert {_text(_graph(), options) for options in same} == {texts[-1]}


def test_large_attributes_go_by_what_passes_see_of_them() -> None:
    def large(number: float) -> Callable[[fx.GraphModule], Any]:
        return lambda gm: setattr(gm, "weight", nn.Buffer(torch.full((100,), number)))

    assert _text(_graph(large(1.0))) == _text(_graph(large(2.0)))


@pytest.mark.parametrize(
    "held", [object(), nn.Linear(1, 1), torch.empty(2).to_sparse()], ids=lambda x: type(x).__name__
)
def test_other_attributes_have_no_key(held: Any) -> None:
    def change(gm: fx.GraphModule) -> None:
        del gm.weight
        gm.weight = held

    with pytest.raises(Unkeyed, match="the graph reads weight, which is"):
        _text(_graph(change))


def test_modules_that_dynamo_did_not_look_into_have_no_key() -> None:
    def change(gm: fx.GraphModule) -> None:
        gm.add_submodule("layer", nn.Linear(2, 2))
        with gm.graph.inserting_before(_node(gm, "softmax")):
            gm.graph.call_module("layer", (_node(gm, "x"),))

    with pytest.raises(Unkeyed, match="calls a module"):
        _text(_graph(change))
