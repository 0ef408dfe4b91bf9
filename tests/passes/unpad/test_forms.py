"""In which form an operand meets packed ones, and how an op is called on forms."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import fx

from attn_compiler.passes.graph.axes import Atom, Dims
from attn_compiler.passes.unpad import forms
from attn_compiler.passes.unpad.refusing import KeepsPadding
from attn_compiler.passes.unpad.values import FormRecipe, Indexed, Kind, Value

aten = torch.ops.aten


def _atom(size: int) -> Atom:
    return Atom(sympy.Integer(size))


ROWS, POSITIONS, WIDTH = _atom(3), _atom(10), _atom(4)
B, S, D = (ROWS,), (POSITIONS,), (WIDTH,)


class Known:
    """A context of values that a test names."""

    batch, seq = ROWS, POSITIONS

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Value] = {}

    def value(self, node: fx.Node) -> Value:
        return self.values[node]

    def given(self, dims: Dims, *, packed: bool = False, kind: Kind = Kind.ORIGINAL) -> fx.Node:
        node = self.graph.placeholder("x")
        node.meta["val"] = torch.empty([int(torch.Size([int(a.size) for a in dim]).numel()) for dim in dims])
        recipe = FormRecipe(needs=(), make=lambda maker, given: node) if packed else None
        self.values[node] = Value(kind=Kind.PACKED if packed else kind, dims=dims, packed=recipe)
        return node

    def form(self, x: fx.Node, dims: Dims) -> Any:
        return forms.operand_form(self, self.graph.call_function(aten.add.Tensor, (x, x)), x, dims)


def test_rows_positions_and_sizes_are_told_apart() -> None:
    known = Known()
    assert forms.tags(known, (ROWS, POSITIONS, WIDTH)) == ("rows", "positions", 4)
    # As many elements as positions are no positions, and an axis of one element is none.
    assert forms.tags(known, (_atom(10), _atom(1))) == (10,)
    assert forms.is_tagged(known, S)
    assert not forms.is_tagged(known, (_atom(10),))


@pytest.mark.parametrize(
    ("dims", "both"),
    [((B, S, D), True), (((ROWS, POSITIONS), D), True), ((B, D), False), ((S, S, B), False), ((), False)],
)
def test_both_are_held_once(dims: Dims, both: bool) -> None:
    assert forms.has_both(Known(), dims) is both


def test_packed_operands_in_one_order_stay_packed() -> None:
    known = Known()
    assert known.form(known.given((B, S, D), packed=True), (B, S, D)) == "packed"
    assert known.form(known.given((B, S), packed=True), ((_atom(2),), B, S)) == "packed"
    with pytest.raises(KeepsPadding) as caught:
        known.form(known.given((S, B), packed=True), (B, S))
    assert "in another order" in caught.value.reason.observed


def test_what_the_model_makes_itself_is_taken_at_the_result_s_tokens() -> None:
    known = Known()
    assert known.form(known.given((B, S, D)), (B, S, D)) == Indexed(batch=0, seq=1, rank=3)
    assert known.form(known.given((S, D)), (B, S, D)) == Indexed(batch=0, seq=1, rank=3)
    assert known.form(known.given((D,)), (B, S, D)) == "plain"
    number = known.graph.placeholder("n")
    number.meta["val"], known.values[number] = 3, Value(kind=Kind.ORIGINAL)
    assert known.form(number, (B, S, D)) == "plain"


def test_what_is_lost_or_shares_an_axis_is_refused() -> None:
    known = Known()
    with pytest.raises(KeepsPadding, match="op between") as caught:
        known.form(known.given((B, S, D), kind=Kind.LOST), (B, S, D))
    assert "can't be packed" in caught.value.reason.observed
    for dims, said in ((((ROWS, WIDTH), S), "share an axis"), (((POSITIONS, ROWS),), "positions come before rows")):
        with pytest.raises(KeepsPadding) as caught:
            known.form(known.given(dims), dims)
        assert said in caught.value.reason.observed
        assert "aten.add.Tensor" in caught.value.reason.observed


def _recorded(recipe: FormRecipe, *given: Any) -> tuple[Any, ...]:
    maker = SimpleNamespace(call=lambda target, *args, **kwargs: (target, args, kwargs), name="maker")
    made: Any = recipe.make(maker, given)  # type: ignore[arg-type]
    return tuple(made)


def test_an_op_is_called_on_its_operands_forms() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(aten.add.Tensor, (x, y), {"alpha": 2})
    recipe = forms.call(node, {x: "packed"})
    assert [tuple(need) for need in recipe.needs] == [(x, "packed"), (y, "plain")]
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert _recorded(recipe, a, b) == (aten.add.Tensor, (a, b), {"alpha": 2})


def test_arguments_are_given_otherwise_by_their_names() -> None:
    graph = fx.Graph()
    x, size = graph.placeholder("x"), graph.placeholder("size")
    node = graph.call_function(aten.expand.default, (x, [size, 4]))
    recipe = forms.call(node, {x: "packed"}, size=lambda maker: [maker.name], implicit=True)
    # What is given otherwise is not needed.
    assert [tuple(need) for need in recipe.needs] == [(x, "packed")]
    a = graph.placeholder("a")
    assert _recorded(recipe, a) == (aten.expand.default, (a, ["maker"]), {"implicit": True})


def test_a_call_that_is_no_op_has_no_names() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    recipe = forms.call(graph.call_function(operator.neg, (x,)), {}, dim=1)
    a = graph.placeholder("a")
    assert _recorded(recipe, a) == (operator.neg, (a,), {})
