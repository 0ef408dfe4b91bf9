"""A model that asks a packed value for its sizes gets those of the batch as it has it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from attn_compiler.passes.graph.axes import Atom, size_expr
from attn_compiler.passes.unpad import asked_sizes
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.passes.unpad.values import Kind
from attn_compiler.reasons.codes import Code
from tests.passes.unpad.encoder import MASK, Encoder, check, compiled, mask_of

ROWS, POSITIONS = "rows", "positions"


def _sizes(*numbers: int) -> list[torch.SymInt]:
    """Symbols, as dynamic sizes are."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=[torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC] * len(numbers)
    )
    return list(mode.from_tensor(torch.empty(numbers), symbolic_context=context).shape)  # type: ignore[arg-type]


class Asked:
    """A graph that asks a packed value x for sizes, and its copy that the numbers are put into."""

    def __init__(self, write: Callable[[fx.Graph, fx.Node, list[torch.SymInt]], Any]) -> None:
        self.graph, self.rewritten = fx.Graph(), fx.Graph()
        sizes = _sizes(3, 10, 5)
        x = self.graph.placeholder("x")
        self.graph.output(write(self.graph, x, sizes))
        copies: dict[fx.Node, fx.Node] = {}
        self.rewritten.output(self.rewritten.graph_copy(self.graph, copies))
        self.maker: Any = SimpleNamespace(
            graph=self.rewritten,
            copies=copies,
            kind_of=lambda node: Kind.PACKED if node is x else None,
            analysis=SimpleNamespace(batch=Atom(size_expr(sizes[0])), seq=Atom(size_expr(sizes[1]))),
            whole_size=lambda axis: (ROWS, POSITIONS)[axis],
            drop=lambda node: None,
        )

    def given(self) -> Any:
        asked_sizes.put_in(self.graph, self.maker)
        (output,) = self.rewritten.find_nodes(op="output")
        return output.args[0]


def _one(axis: int) -> Callable[..., fx.Node]:
    def write(graph: fx.Graph, x: fx.Node, sizes: list[torch.SymInt]) -> fx.Node:
        node = graph.call_method("size", (x, axis))
        node.meta["example_value"] = sizes[axis]
        return graph.call_function(operator.mul, (node, 2))

    return write


@pytest.mark.parametrize(("axis", "name"), [(0, ROWS), (1, POSITIONS)])
def test_a_size_is_that_of_the_batch(axis: int, name: str) -> None:
    assert Asked(_one(axis)).given().args == (name, 2)


def test_a_size_that_the_mask_does_not_have_keeps_padding_in() -> None:
    with pytest.raises(KeepsPadding) as caught:
        Asked(_one(2)).given()
    assert caught.value.reason.code is Code.PADDING_SIZES


def test_all_sizes_are_taken_apart() -> None:
    def write(graph: fx.Graph, x: fx.Node, sizes: list[torch.SymInt]) -> Any:
        node = graph.call_method("size", (x,))
        node.meta["example_value"] = (sizes[0], sizes[1], 16)
        first, last = (graph.call_function(operator.getitem, (node, i)) for i in (1, -1))
        return graph.call_function(operator.add, (first, last)), node

    added, whole = Asked(write).given()
    assert added.args == (POSITIONS, 16)
    assert whole == (ROWS, POSITIONS, 16)


def test_what_is_no_size_keeps_padding_in() -> None:
    def write(graph: fx.Graph, x: fx.Node, sizes: list[torch.SymInt]) -> Any:
        node = graph.call_function(getattr, (x, "device"))
        node.meta["example_value"] = torch.device("cpu")
        return node

    with pytest.raises(KeepsPadding) as caught:
        Asked(write).given()
    assert "nothing but sizes" in caught.value.reason.rule


def test_what_is_asked_of_other_values_stays() -> None:
    def write(graph: fx.Graph, x: fx.Node, sizes: list[torch.SymInt]) -> Any:
        other = graph.placeholder("other")
        node = graph.call_method("size", (other, 0))
        node.meta["example_value"] = sizes[0]
        return node

    assert Asked(write).given().target == "size"


def test_a_model_that_divides_by_its_length() -> None:
    model = Encoder(ending=lambda x, mask: x / x.shape[1] + x.shape[0])
    function = compiled(model, dynamic=True)
    for mask in (MASK, mask_of(2, 12, length=12)):
        assert check(model, mask, function).kept is None
