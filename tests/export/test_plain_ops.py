"""Programs of plain ops and of ours, exported and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram

from attn_compiler.export.readable import Readable, put_back, readable
from attn_compiler.export.rewriting import compiled_ahead, spelled_out
from attn_compiler.torch_private import compat as torch_compat, export as torch_export, tracing as torch_tracing
from tests import fresh
from tests.export import models
from tests.export.models import batch, exported, kept, made

# Ops of ours that are left in a program are those that a compilation takes apart.
OWN = torch.ops.attn_compiler


def _graph(op: object) -> tuple[fx.GraphModule, fx.Node]:
    graph = fx.Graph()
    node = graph.call_function(op, (graph.placeholder("x"),))  # type: ignore[arg-type]
    graph.output(node)
    return fx.GraphModule({}, graph), node


@pytest.mark.parametrize(
    ("op", "becomes"),
    [
        (OWN.triton.default, "attn_compiler::triton_packaged"),
        (OWN.tile_lists.default, "attn_compiler::tile_lists_packaged"),
        (OWN.held.default, "aten::clone"),
        (torch.ops.aten.neg.default, "aten::neg"),
    ],
)
def test_each_op_becomes_one_that_is_compiled_ahead(op: object, becomes: str) -> None:
    gm, node = _graph(op)
    compiled_ahead(gm, before=[])
    assert node.target.name() == becomes  # type: ignore[union-attr]


def test_what_was_there_before_stays() -> None:
    gm, node = _graph(OWN.held.default)
    compiled_ahead(gm, before=[node])
    assert node.target is OWN.held.default


def test_an_op_that_can_not_be_taken_apart_is_an_error() -> None:
    gm, _ = _graph(OWN.rows.default)
    with pytest.raises(KeyError):
        compiled_ahead(gm, before=[])


def test_the_ops_are_there_once_the_module_is_imported() -> None:
    code = "import attn_compiler.export, torch; print(torch.ops.attn_compiler.triton_packaged.default)"
    assert fresh.run(code).stdout.strip() == "attn_compiler.triton_packaged.default"


# What was emitted becomes ATen's ops, whether a function, a method, or made of nothing.
aten = torch.ops.aten


def _plain_graph() -> tuple[fx.GraphModule, frozenset[fx.Node], FakeTensorMode]:
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
    gm, before, mode = _plain_graph()
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
    gm, before, mode = _plain_graph()
    _emit(gm, mode, lambda x: gm.graph.call_function(torch.flatten, (x, 0, 1)))
    spelled_out(gm, before, mode)
    (new,) = gm.graph.output_node().all_input_nodes
    assert not isinstance(new.meta["example_value"].shape[0], int)


# An exported graph is given Dynamo's names for its values, and comes back as it was.
ASSERTION = torch.ops.aten._assert_tensor_metadata.default


def _read(program: ExportedProgram) -> Readable:
    return readable(torch_export.copied_graph(program), torch_export.numbers(program))


def test_every_value_has_both_names_and_wants_no_gradient() -> None:
    program = exported(made(models.WithoutGradients), batch())
    for module in torch_compat.graph_modules(_read(program).graph_module):
        for node in module.graph.nodes:
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage()._cdata == node.meta["val"].untyped_storage()._cdata
                assert not value.requires_grad
    assert any(node.meta["val"].requires_grad for node in program.graph.find_nodes(op="placeholder"))


def test_constants_of_one_element_are_known() -> None:
    read = _read(exported(made(models.ByHand), batch(), kept()))
    known = [node for node in read.before if "constant" in node.meta]
    assert [float(node.meta["constant"]) for node in known] == [0.0]


def test_assertions_are_taken_out_and_put_back_behind_what_they_read() -> None:
    program = exported(made(models.ByHand), batch(), kept())
    read = _read(program)
    graph = read.graph_module.graph
    assert len(read.assertions) == 2
    assert not graph.find_nodes(op="call_function", target=ASSERTION)
    put_back(read)
    graph.lint()
    before = program.graph.find_nodes(op="call_function", target=ASSERTION)
    after = graph.find_nodes(op="call_function", target=ASSERTION)
    assert [(node.args[0].name, node.kwargs) for node in after] == [(node.args[0].name, node.kwargs) for node in before]
    assert all(node.meta.keys().isdisjoint({"example_value", "constant"}) for node in read.before)


def test_an_assertion_of_an_input_stands_behind_all_inputs() -> None:
    class Cast(models.CausalMask):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(torch.float32))

    read = _read(exported(made(Cast), batch()))
    put_back(read)
    (assertion,) = read.graph_module.graph.find_nodes(op="call_function", target=ASSERTION)
    assert assertion.args[0].op == assertion.prev.op == "placeholder"
    assert assertion.next.op == "call_function"


def test_an_assertion_goes_with_what_it_reads() -> None:
    read = _read(exported(made(models.ByHand), batch(), kept()))
    graph = read.graph_module.graph
    for assertion in read.assertions:
        assertion.tensor.replace_all_uses_with(graph.find_nodes(op="placeholder")[0])
        graph.erase_node(assertion.tensor)
    put_back(read)
    assert not graph.find_nodes(op="call_function", target=ASSERTION)
