"""An exported graph is given Dynamo's names for its values, and comes back as it was."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from attn_compiler.export.readable import Readable, put_back, readable
from attn_compiler.torch_private import compat as torch_compat, export as torch_export
from tests.export import models
from tests.export.models import batch, exported, kept, made

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
