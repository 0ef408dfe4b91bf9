"""Arguments of which a line says that positions stay by themselves, and those of which none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler.passes.context_parallel import arguments, ops
from attn_compiler.passes.context_parallel.places import Mixes
from attn_compiler.passes.graph import axis_rules

aten = torch.ops.aten


def _node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") if x == "tensor" else x for i, x in enumerate(args)]
    return graph.call_function(target, tuple(given), kwargs)


def test_every_rule_has_a_line_but_views_copies_and_results_of_several() -> None:
    without = {line.rule for op, line in axis_rules.RULES.items() if op not in arguments.TAKEN}
    assert without == set(ops.TAKES_ANY)
    assert not any(line.rule in ops.TAKES_ANY for op, line in axis_rules.RULES.items() if op in arguments.TAKEN)


@pytest.mark.parametrize("op", arguments.TAKEN, ids=str)
def test_a_line_names_arguments_that_the_op_has(op: Any) -> None:
    names = {argument.name for argument in op._schema.arguments}
    assert arguments.TAKEN[op] <= names | arguments._ALONG


@pytest.mark.parametrize(
    "node",
    [
        _node(aten.embedding.default, "tensor", "tensor", 3),
        _node(aten.embedding.default, "tensor", "tensor", -1, False, False),
        _node(aten.add.Tensor, "tensor", 0.5, alpha=2),
        _node(aten.gelu.default, "tensor", approximate="tanh"),
        _node(aten.clamp.default, "tensor", None, 3.0),
        _node(aten.softmax.int, "tensor", -1, torch.float32),
    ],
    ids=str,
)
def test_known_arguments_are_taken(node: fx.Node) -> None:
    assert arguments.unknown(node) is None


@pytest.mark.parametrize(
    ("node", "name"),
    [
        (_node(aten.embedding.default, "tensor", "tensor", -1, True), "scale_grad_by_freq=True"),
        (_node(aten.einsum.default, "ab,bc->ac", ["x", "y"], path=[0, 1]), "path=[0, 1]"),
        (_node(aten.bernoulli.p, "tensor", 0.5, generator="one"), "generator=one"),
    ],
    ids=str,
)
def test_an_argument_without_a_line_is_named(node: fx.Node, name: str) -> None:
    found = arguments.unknown(node)
    assert isinstance(found, Mixes)
    assert name in found.why
