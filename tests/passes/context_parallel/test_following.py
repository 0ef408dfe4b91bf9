"""Which inputs are cut, and where values hold the sequence: whether a rank has a part of them, or all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attn_compiler.passes.context_parallel import following
from attn_compiler.passes.context_parallel.following import Following
from attn_compiler.passes.context_parallel.places import Mixes, Place
from attn_compiler.passes.context_parallel.refusing import CannotShard
from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.passes.compiling import mark, mirror_of
from tests.passes.context_parallel.compiled import LENGTH, Before, compile_and_run


def _graph(**values: Any) -> fx.Graph:
    graph = fx.Graph()
    for name, value in values.items():
        graph.placeholder(name).meta["example_value"] = value
    return graph


def test_inputs_are_cut_along_their_positions() -> None:
    graph = _graph(
        l_ids_=torch.zeros(2, 8).long(),
        l_mask_=torch.zeros(8).bool(),
        l_spans_=torch.zeros(2, 3, 8).long(),
        l_hidden_=torch.zeros(2, 8, 16),
    )
    found = following.inputs(graph, ())
    assert {node.name: (one.axis, one.length) for node, one in found.items()} == {
        "l_ids_": (1, 8), "l_mask_": (0, 8), "l_spans_": (2, 8), "l_hidden_": (1, 8)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l_number_", 7),
        ("l_table_", torch.zeros(9, 16)),
        ("l_image_", torch.zeros(2, 3, 8, 8)),
        ("l_one_", torch.zeros(2, 1, 16)),
        ("l_scalar_", torch.tensor(3)),
        ("l_x_", nn.Parameter(torch.zeros(2, 8, 16))),
        ("l_self_modules_norm_parameters_weight_", torch.zeros(2, 8, 16)),
        ("l_kept_", torch.zeros(2, 8, 16)),
    ],
)
def test_what_every_rank_has_is_not_cut(name: str, value: Any) -> None:
    assert following.inputs(_graph(**{name: value}), ("kept",)) == {}


@pytest.mark.parametrize(
    ("name", "is_meant"),
    [("l_kept_", True), ("l_data_kept_", True), ("kept", True), ("l_keptness_", False), ("l_unkept_", False)],
)
def test_a_name_is_a_whole_word(name: str, is_meant: bool) -> None:
    (node,) = _graph(**{name: torch.zeros(2, 8)}).nodes
    assert following.is_named(node, ("kept",)) is is_meant


def test_a_symbolic_length_is_refused() -> None:
    graph: list[fx.Graph] = []
    mirror = mirror_of(lambda x: x * 2, mark(torch.zeros(2, 8, 16), [8]))
    for node in mirror.graph.nodes:
        dynamo = mirror.dynamo_node(node) if node.op == "placeholder" else None
        if dynamo is not None and isinstance(dynamo.meta["example_value"], Tensor):
            graph.append(dynamo.graph)
    with pytest.raises(CannotShard) as caught:
        following.inputs(graph[0], ())
    assert caught.value.reason.remedy == "compile with dynamic=False"


def _followed(function: Any, *inputs: Tensor, allowed: tuple[str, ...] = ()) -> tuple[Following, fx.Node]:
    """Of a function without attention; and the value that it gives."""
    mirror = mirror_of(function, *inputs)
    (output,) = mirror.graph.find_nodes(op="output")
    (out,) = output.all_input_nodes
    owners = [mirror.dynamo_node(n) for n in mirror.graph.nodes if n.op == "placeholder"]
    (graph,) = {n.graph for n in owners if n is not None}
    return Following(mirror, following.inputs(graph, ()), [], allowed), out


X = torch.zeros(2, 8, 16)


def test_the_sequence_is_followed_through_views() -> None:
    found, out = _followed(lambda x: x.view(2, 8, 4, 4).transpose(1, 2).cos(), X)
    assert found.holds(out)
    place = found.places[out]
    assert isinstance(place, Place)
    assert [any(atom in found.atoms for atom in dim) for dim in place.dims] == [False, False, True, False]


def test_what_is_made_of_no_input_holds_none() -> None:
    found, out = _followed(lambda x: x.new_ones(2, 8, 16).cumsum(1), X)
    assert not found.holds(out)
    assert found.looks_like_part(out)


def test_what_mixes_is_told_to_all_that_reads_it() -> None:
    found, out = _followed(lambda x: x.flip(1).cos().exp(), X)
    mixed = found.places[out]
    assert isinstance(mixed, Mixes)
    assert "flip" in str(mixed.at.target)
    assert not found.holds(out)
    assert not found.holds_still(out)
    error = following.refused(mixed)
    assert "flip" in error.reason.observed
    assert "allow=('aten.flip.default',)" in str(error.reason.remedy)
    assert error.at is mixed.at


def test_an_op_that_the_user_answers_for_lies_as_its_operand() -> None:
    found, out = _followed(lambda x: x.flip(1).cos(), X, allowed=("aten.flip.default",))
    assert found.holds_still(out)


def _by_length(factor: float) -> Before:
    return lambda model, x, data: x * factor


def test_a_factor_that_looks_like_the_length_is_refused_unless_it_is_answered_for() -> None:
    with pytest.raises(ContextParallelUnsupported, match="may come from the length of a part"):
        compile_and_run(before=_by_length(1 / LENGTH))
    compile_and_run(before=_by_length(1 / LENGTH), allow=("length",))
    compile_and_run(before=_by_length(0.3))
