from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx

from attn_compiler.passes.graph import mutation
from attn_compiler.passes.graph.mirror import Mirror
from attn_compiler.passes.graph.mutation import Version
from attn_compiler.verifying.values import Body, Key, NoValueError, Values
from tests.passes.compiling import captured

Tensor = torch.Tensor


class _Recorded:
    """The mirror of a function, and the values of some of its Dynamo nodes."""

    def __init__(self, function: Any, *inputs: Tensor, known: tuple[str, ...] | None = None) -> None:
        gm, self.mirror = captured(function, *inputs)
        self.gm = gm
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        names = frozenset(n.name for n in (placeholders if known is None else gm.graph.nodes))
        self.body = Body(index=3, original=names, rewritten=fx.Graph(), mirror=self.mirror)
        self.values = Values(bodies={self.mirror.graph: self.body})
        for node, x in zip(placeholders, inputs, strict=True):
            self.values.recorded[Key(3, node.name)] = x

    def node(self, name: str) -> fx.Node:
        return _named(self.mirror, name)


def _named(mirror: Mirror, name: str) -> fx.Node:
    (node,) = (n for n in mirror.graph.nodes if n.op == "call_function" and str(n.target).split(".")[1] == name)
    return node


def _needs(found: _Recorded, node: fx.Node, version: Version | None = None) -> set[Key]:
    return found.values.needs(lambda asked: asked.mirror(node) if version is None else asked.at(version))


def test_values_are_computed_from_what_was_recorded() -> None:
    x = torch.randn(3, 4)
    found = _Recorded(lambda x: (x + 1).mT.cos(), x)
    assert _needs(found, found.node("cos")) == {Key(3, n) for n in found.body.original}
    torch.testing.assert_close(found.values.mirror(found.node("cos")), (x + 1).mT.cos())


def test_constants_of_the_graph_have_values() -> None:
    found = _Recorded(lambda x: x * torch.tensor([2.0, 3.0]), torch.ones(2))
    assert found.values.mirror(found.node("mul")).tolist() == [2.0, 3.0]


def test_what_is_random_or_written_or_opaque_has_none() -> None:
    def random(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).cos()

    def written(x: Tensor) -> Tensor:
        return x.clone().add_(1).cos()

    for function, why in ((random, "random"), (written, "in place")):
        found = _Recorded(function, torch.ones(3))
        with pytest.raises(NoValueError, match=why):
            _needs(found, found.node("cos"))


def test_what_is_held_between_two_writes_inside_of_one_call_has_none() -> None:
    def function(x: Tensor) -> Tensor:
        return F.relu(x + 1, inplace=True).cos()

    found = _Recorded(function, torch.ones(3), known=("all",))
    relu = next(n for n in found.mirror.graph.nodes if mutation.writes(n))
    source = relu.all_input_nodes[0]
    before, after = (mutation.version(found.mirror, source, found.mirror.order(relu) + i) for i in (0, 1))
    assert _needs(found, source, before) == {Key(3, "add", None, copied=True)}
    assert _needs(found, source, after) == {Key(3, "add", found.mirror.owner(relu).name)}
    found.body.names.pop(source)
    with pytest.raises(NoValueError, match="written in place"):
        _needs(found, source, after)


def test_dropout_that_drops_nothing_is_not_random() -> None:
    for function in (lambda x: F.dropout(x, 0.0).cos(), lambda x: F.dropout(x, 0.5, training=False).cos()):
        found = _Recorded(function, torch.ones(3))
        assert _needs(found, found.node("cos"))


def test_a_node_of_another_graph_has_none() -> None:
    found, other = (_Recorded(torch.cos, torch.ones(3)) for _ in range(2))
    with pytest.raises(NoValueError, match="not recorded"):
        _needs(found, other.node("cos"))


def test_another_dtype_takes_the_place_of_every_floating_one() -> None:
    found = _Recorded(lambda x: x.softmax(-1, dtype=torch.bfloat16), torch.ones(3))
    node = found.node("softmax")
    x = torch.ones(3, dtype=torch.float64)
    assert found.values.call(node, lambda _: x, dtype=torch.float64).dtype == torch.float64
    assert found.values.call(node, lambda _: x).dtype == torch.bfloat16


def test_sizes() -> None:
    s0, s1 = sympy.symbols("s0 s1", integer=True, positive=True)
    values = Values(bodies={}, symbols={"s0": 6})
    assert values.size(2 * s0 + 1) == 13
    assert values.size(sympy.Integer(4)) == 4
    with pytest.raises(NoValueError, match="s1"):
        values.size(s0 + s1)


def test_new_nodes_are_computed_and_the_others_are_not() -> None:
    graph = fx.Graph()
    x, old = graph.placeholder("x"), graph.placeholder("old_out")
    new = graph.call_function(torch.add, (x, old))
    last = graph.call_method("mul", (new, 10))
    found = _Recorded(torch.cos, torch.ones(3))
    body = Body(
        index=0, original=frozenset({"x", "old_out"}), rewritten=graph, mirror=found.mirror, outs={last.name: "old_out"}
    )
    values = Values(bodies={}, recorded={Key(0, "x"): torch.ones(2), Key(0, "old_out"): torch.tensor([1.0, 2.0])})
    assert values.needs(lambda asked: asked.rewritten(body, last)) == {Key(0, "x"), Key(0, "old_out")}
    # At the site itself its own new output is computed; anywhere below, the model's own value stands for it.
    assert values.rewritten(body, last).tolist() == [20.0, 30.0]
    below = graph.call_function(torch.neg, (last,))
    assert values.rewritten(body, below).tolist() == [-1.0, -2.0]


def test_an_input_that_only_the_rewritten_graph_has_is_refused() -> None:
    graph = fx.Graph()
    y = graph.placeholder("y")
    found = _Recorded(torch.cos, torch.ones(3))
    body = Body(index=0, original=frozenset(), rewritten=graph, mirror=found.mirror)
    with pytest.raises(NoValueError, match="y of the rewritten graph"):
        found.values.rewritten(body, graph.call_function(torch.neg, (y,)))
