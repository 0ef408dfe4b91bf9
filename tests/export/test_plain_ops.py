"""What was emitted becomes ATen's ops, whether a function, a method, or made of nothing; what was there stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from attn_compiler.export.rewriting import spelled_out
from attn_compiler.torch_private import tracing as torch_tracing
from tests.export import models
from tests.export.models import batch, exported, made

aten = torch.ops.aten


def _graph() -> tuple[fx.GraphModule, frozenset[fx.Node], FakeTensorMode]:
    gm = exported(made(models.CausalMask), batch(), dynamic=True).graph_module
    for node in gm.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    mode = torch_tracing.fake_mode_of_values(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder"))
    if mode is None:
        pytest.fail("an export has fake values")
    return gm, frozenset(gm.graph.nodes), mode


def _emit(gm: fx.GraphModule, mode: FakeTensorMode, make: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A node that another one reads, at the end of the graph."""
    last = gm.graph.output_node()
    x = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_before(last):
        node = make(x)
        called: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        with mode, torch.no_grad():
            node.meta["example_value"] = called(*args, **kwargs)
    last.args = ((node,),)
    return node


@pytest.mark.parametrize(
    ("make", "ops"),
    [
        (lambda g: lambda x: g.call_function(torch.mul, (x, 2.0)), [aten.mul.Tensor]),
        (lambda g: lambda x: g.call_method("to", (x, torch.float64)), [aten.to.dtype]),
        (lambda g: lambda x: g.call_function(torch.zeros, ((2, 3),), {"device": "cpu"}), [aten.zeros.default]),
        (lambda g: lambda x: g.call_function(aten.relu.default, (x,)), [aten.relu.default]),
    ],
    ids=["function", "method", "of nothing", "an op of ATen"],
)
def test_what_was_emitted_becomes_ops_of_aten(make: Any, ops: list[object]) -> None:
    gm, before, mode = _graph()
    node = _emit(gm, mode, make(gm.graph))
    value = node.meta["example_value"]
    replaced = spelled_out(gm, before, mode)
    gm.graph.lint()
    assert [n.target for n in gm.graph.nodes if n not in before] == ops
    (new,) = gm.graph.output_node().all_input_nodes
    assert new is replaced.get(node, node)
    assert new.meta["example_value"].shape == value.shape
    assert new.meta["example_value"].dtype == value.dtype
    assert new.meta["example_value"].fake_mode is mode


def test_symbolic_sizes_stay_symbolic() -> None:
    gm, before, mode = _graph()
    _emit(gm, mode, lambda x: gm.graph.call_function(torch.flatten, (x, 0, 1)))
    spelled_out(gm, before, mode)
    (new,) = gm.graph.output_node().all_input_nodes
    assert not isinstance(new.meta["example_value"].shape[0], int)
