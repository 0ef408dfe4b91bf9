"""Ops of ours that are left in a program are those that a compilation takes apart."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from attn_compiler.export.rewriting import compiled_ahead
from tests import fresh

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
