from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from attn_compiler.options.options import Options
from attn_compiler.passes.rewrites import key, record
from attn_compiler.passes.rewrites.key import Keyed
from attn_compiler.passes.rewrites.refusing import Unkeyed
from tests.passes.rewrites.watching import described

MODE = FakeTensorMode()


def _graph() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    z = graph.call_method("cos", (y,))
    graph.output((z, y))
    gm = fx.GraphModule(nn.Module(), graph)
    for node in list(graph.nodes)[:-1]:
        with MODE:
            node.meta["example_value"] = torch.empty(2, 3)
        node.meta["stack_trace"] = f"line of {node.name}"
    return gm


def _keyed(gm: fx.GraphModule) -> Keyed:
    return key.of(gm, Options(), None)


def _named(gm: fx.GraphModule) -> dict[str, fx.Node]:
    return {node.name: node for node in gm.graph.nodes}


def _rewritten(gm: fx.GraphModule) -> None:
    """cos(sin(x)) becomes tanh(x.t()).t(), in the name of cos; sin stays, and is given something else."""
    nodes = _named(gm)
    with gm.graph.inserting_before(nodes["sin"]):
        first = gm.graph.call_method("t", (nodes["x"],))
    with gm.graph.inserting_before(nodes["cos"]):
        second = gm.graph.call_function(torch.tanh, (first,))
        last = gm.graph.call_function(torch.ops.aten.t.default, (second,))
    for node, value in ((first, nodes["x"].meta["example_value"].t()), (second, MODE.from_tensor(torch.empty(3, 2)))):
        node.meta.update({**nodes["cos"].meta, "example_value": value})
    last.meta["example_value"] = None
    nodes["cos"].replace_all_uses_with(last)
    gm.graph.erase_node(nodes["cos"])
    nodes["sin"].args = (first,)
    nodes["sin"].meta["example_value"] = MODE.from_tensor(torch.empty(3, 2))


def test_what_was_done_is_done_again() -> None:
    one, other = _graph(), _graph()
    before = _keyed(one)
    _rewritten(one)
    one.recompile()
    edits = record.taken(before)
    again = _keyed(other)
    assert again.text == before.text
    record.apply(again, edits, MODE)
    assert described(other) == described(one)
    assert [node.name for node in other.graph.nodes] == ["x", "t", "sin", "tanh", "t_default", "output"]
    assert _named(other)["tanh"].meta["stack_trace"] == "line of cos"
    assert other.code == one.code
    other.graph.lint()


def test_nothing_done_is_no_edit() -> None:
    assert record.taken(_keyed(_graph())) == ()


def _new_buffer(gm: fx.GraphModule) -> None:
    gm.register_buffer("more", torch.ones(1))


def _moved(gm: fx.GraphModule) -> None:
    nodes = _named(gm)
    nodes["x"].prepend(nodes["sin"])


def _strange_function(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(_named(gm)["cos"]):
        gm.graph.call_function(print, ("hello",))


def _strange_origin(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(_named(gm)["cos"]):
        gm.graph.call_function(torch.tanh, (_named(gm)["x"],)).meta["stack_trace"] = "from nowhere"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_new_buffer, "kept from call to call"),
        (_moved, "changed places"),
        (_strange_function, "print"),
        (_strange_origin, "not known where the new node tanh is from"),
    ],
)
def test_what_can_not_be_told_is_refused(change: Any, said: str) -> None:
    gm = _graph()
    keyed = _keyed(gm)
    change(gm)
    with pytest.raises(Unkeyed, match=said):
        record.taken(keyed)
