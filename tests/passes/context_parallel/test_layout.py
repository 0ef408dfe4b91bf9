"""Layouts of shared sequences: places, numbers, spreads of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sympy
import torch
from torch import fx
from torch.nn.functional import scaled_dot_product_attention

from attn_compiler.context_parallel import collectives as torch_collectives
from attn_compiler.passes.context_parallel import ops
from attn_compiler.passes.context_parallel.agreement import SequenceRewrite, SlotRewrite, Spread
from attn_compiler.passes.context_parallel.decoding import SlotOutcome
from attn_compiler.passes.context_parallel.exchanging import GraphLayout
from attn_compiler.passes.context_parallel.places import Mixes, Place, alike, has, place_of
from attn_compiler.passes.graph import axis_rules
from attn_compiler.passes.graph.axes import Atom, AxisError, Dim
from attn_compiler.reasons.errors import ContextParallelUnsupported
from tests.lowerings.emitting import GraphEmitter
from tests.passes.context_parallel.compiled import HEADS, LENGTH, Attend, Data, Model, compile_and_run

# Where the positions of all ranks stand in the whole sequence, and what the collectives are told.
CPU = torch.device("cpu")


def _positions(monkeypatch: pytest.MonkeyPatch, layout: GraphLayout, rank: int, length: int) -> torch.Tensor:
    monkeypatch.setattr(torch_collectives, "rank_of", lambda group: rank)
    builder = GraphEmitter(fx.Graph())
    return builder.value(layout.positions(builder, length, CPU))  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "length"), [(1, 4), (2, 1), (2, 6), (3, 7), (4, 2)])
def test_pieces_follow_each_other(monkeypatch: pytest.MonkeyPatch, size: int, length: int) -> None:
    layout = GraphLayout(size=size, group="g", is_balanced=False)
    found = [_positions(monkeypatch, layout, rank, length) for rank in range(size)]
    assert torch.equal(torch.cat(found), torch.arange(size * length))
    assert {x.dtype for x in found} == {torch.int64}


@pytest.mark.parametrize(("size", "length"), [(1, 4), (2, 2), (2, 6), (4, 8)])
def test_balanced_ranks_have_a_chunk_of_the_front_and_one_of_the_back(
    monkeypatch: pytest.MonkeyPatch, size: int, length: int
) -> None:
    layout, half = GraphLayout(size=size, group="g", is_balanced=True), length // 2
    chunks = torch.arange(size * length).view(2 * size, half)
    for rank in range(size):
        expected = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        assert torch.equal(_positions(monkeypatch, layout, rank, length), expected)


def test_no_graph_holds_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for rank in (0, 1):
        monkeypatch.setattr(torch_collectives, "rank_of", lambda group, rank=rank: rank)
        builder, layout = GraphEmitter(fx.Graph()), GraphLayout(size=2, group="g", is_balanced=True)
        first = layout.positions(builder, 4, CPU)  # type: ignore[arg-type]
        assert layout.positions(builder, 4, CPU) is first  # type: ignore[arg-type]
        builder.graph.output(first)
        texts.append(str(builder.graph))
    assert texts[0] == texts[1]
    assert "sequence_rank" in texts[0]


@pytest.mark.parametrize("is_balanced", [True, False])
def test_collectives_are_told_how_the_sequence_lies(is_balanced: bool) -> None:
    told: list[tuple[object, ...]] = []

    class Told:
        def call(self, function: object, *args: object) -> None:
            told.append((function, *args))

    layout, builder = GraphLayout(size=4, group="g", is_balanced=is_balanced), Told()
    for one in (
        lambda: layout.gathered(builder, "x", 2),
        lambda: layout.to_heads(builder, "x"),
        lambda: layout.to_positions(builder, "x"),
    ):  # type: ignore[arg-type]
        one()
    assert told == [
        (torch_collectives.gathered_sequence, "x", 2, 4, is_balanced, "g"),
        (torch_collectives.heads_for_positions, "x", 4, is_balanced, "g"),
        (torch_collectives.positions_for_heads, "x", 4, is_balanced, "g"),
    ]


# When two dimensions hold the same sequence at the same place.
def _atom(size: int) -> Atom:
    return Atom(sympy.Integer(size))


SEQUENCE, OTHER_SEQUENCE = _atom(6), _atom(6)
CONTEXT: Any = SimpleNamespace(atoms=frozenset({SEQUENCE, OTHER_SEQUENCE}))


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ((SEQUENCE,), (SEQUENCE,), True),
        ((SEQUENCE,), (OTHER_SEQUENCE,), False),
        # As many elements are not the same positions.
        ((SEQUENCE,), (_atom(6),), False),
        ((_atom(6),), (_atom(6),), True),
        ((_atom(2), SEQUENCE), (_atom(2), SEQUENCE), True),
        ((_atom(2), SEQUENCE), (SEQUENCE, _atom(2)), False),
        ((_atom(2), SEQUENCE), (_atom(3), SEQUENCE), False),
        ((_atom(1), SEQUENCE, _atom(1)), (SEQUENCE,), True),
        ((SEQUENCE,), (), False),
        ((), (_atom(1),), True),
    ],
)
def test_the_same_sequence_among_axes_of_the_same_sizes(one: Dim, other: Dim, are_alike: bool) -> None:
    assert alike(CONTEXT.atoms, one, other) is are_alike
    assert alike(CONTEXT.atoms, other, one) is are_alike


def test_a_dimension_that_was_split_holds_what_its_parts_hold() -> None:
    whole = _atom(12)
    assert not has(CONTEXT, (whole,))
    whole.parts = (_atom(2), SEQUENCE)
    assert has(CONTEXT, (whole,))


def test_what_mixes_has_no_place() -> None:
    graph = fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    place = Place(dims=((SEQUENCE,),))
    context: Any = SimpleNamespace(places={one: place, other: Mixes(at=other, why="it is sorted")})
    assert place_of(context, one) is place
    with pytest.raises(AxisError, match="it is sorted"):
        place_of(context, other)


# Numbers of a mask, a bias or a scale that look like the length of a rank's part, and those that do not.
Index = torch.Tensor


def _mask(make: Callable[[Index, Index, int], torch.Tensor]) -> Attend:
    def attend(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
        count = torch.arange(q.shape[2])
        return scaled_dot_product_attention(q, k, v, attn_mask=make(count[:, None], count[None], q.shape[2]))

    return attend


def _scaled(scale: Callable[[int], float]) -> Attend:
    return lambda m, q, k, v, d: scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale(q.shape[2]))


def _centred(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    count = torch.arange(q.shape[2])
    bias = model.table[count[None] - count[:, None] + q.shape[2] - 1].permute(2, 0, 1)[None]
    return scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _bucketed(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: Data) -> torch.Tensor:
    """As T5 does it: 16 is in another bucket in another dtype."""
    count = torch.arange(q.shape[2])
    distance = (count[None] - count[:, None]).abs()
    far = 7 + (torch.log(distance.clamp(min=1).float() / 7) / math.log(13) * 7).to(torch.int64)
    bias = model.table[torch.where(distance < 7, distance, far.clamp(0, 13))].permute(2, 0, 1)[None]
    return scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_buckets_that_depend_on_rounding_are_refused() -> None:
    with pytest.raises(ContextParallelUnsupported, match="depends on how a number is rounded"):
        compile_and_run(attend=_bucketed)


OF_LENGTH: dict[str, Attend] = {
    "prefix of all but one": _mask(lambda q, k, n: (k < n - 1) | (k <= q)),
    "prefix of half": _mask(lambda q, k, n: (k < n // 2) | (k <= q)),
    "window as wide as a part": _mask(lambda q, k, n: (k <= q) & (q - k < n)),
    "from the last position on": _mask(lambda q, k, n: (0.5 * (k - (n - 1))).expand(n, n)),
    "distance by length": _mask(lambda q, k, n: (k - q) / n),
    "table with its centre at the last position": _centred,
    "scale by the logarithm": _scaled(math.log),
    "default scale by the logarithm": _scaled(lambda n: math.log(n) / math.sqrt(16 // HEADS)),
}

OF_THE_MODEL: dict[str, Attend] = {
    "prefix": _mask(lambda q, k, n: (k < 5) | (k <= q)),
    "window of half": _mask(lambda q, k, n: (k <= q) & (q - k < LENGTH // 2)),
    "window wider than a part": _mask(lambda q, k, n: (k <= q) & (q - k < LENGTH + 7)),
    "distance by a number": _mask(lambda q, k, n: (k - q) / 10),
    "scale": _scaled(lambda n: 0.3),
}


@pytest.mark.parametrize("name", OF_LENGTH)
def test_a_number_that_looks_like_the_length_is_refused(name: str) -> None:
    with pytest.raises(ContextParallelUnsupported, match=f"a rank has {LENGTH} positions.*allow=.'length',"):
        compile_and_run(attend=OF_LENGTH[name])


@pytest.mark.parametrize("name", ["window as wide as a part", "scale by the logarithm"])
def test_it_may_be_chance(name: str) -> None:
    compile_and_run(attend=OF_LENGTH[name], allow=("length",))


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_other_numbers_are_taken(name: str) -> None:
    compile_and_run(attend=OF_THE_MODEL[name])


# Which graphs have to be matched again.
SPREAD_SEQUENCE = SequenceRewrite(sites=1, misses=0, shared=0, lengths=(4,), done={}, by_value="")
SENT = SlotRewrite(sites=1, misses=0, outcome=SlotOutcome(sent={"layer": None}))
GATHERED = SlotRewrite(sites=1, misses=0, outcome=SlotOutcome(kept={"layer": "it has a gradient"}))


@pytest.mark.parametrize(
    ("rewrite", "expected"), [(SPREAD_SEQUENCE, True), (SENT, True), (GATHERED, False), (None, False)]
)
def test_a_graph_that_was_written_to_is_another_one(rewrite: Any, expected: bool) -> None:
    nothing = cast(Any, None)
    assert Spread(cp=nothing, beside=(), mirror=nothing, call=(), rewrite=rewrite).is_other_graph is expected


# Arguments of which a line says that positions stay by themselves, and those of which none does.
aten = torch.ops.aten


def _node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") if x == "tensor" else x for i, x in enumerate(args)]
    return graph.call_function(target, tuple(given), kwargs)


def test_every_rule_has_a_line_but_views_copies_and_results_of_several() -> None:
    without = {line.rule for op, line in axis_rules.RULES.items() if op not in ops.TAKEN}
    assert without == set(ops.TAKES_ANY)
    assert not any(line.rule in ops.TAKES_ANY for op, line in axis_rules.RULES.items() if op in ops.TAKEN)


@pytest.mark.parametrize("op", ops.TAKEN, ids=str)
def test_a_line_names_arguments_that_the_op_has(op: Any) -> None:
    names = {argument.name for argument in op._schema.arguments}
    assert ops.TAKEN[op] <= names | ops._ALONG


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
    assert ops.unknown(node) is None


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
    found = ops.unknown(node)
    assert isinstance(found, Mixes)
    assert name in found.why
