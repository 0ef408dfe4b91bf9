"""What a rank holds of other ranks in a ring, and when, in the graphs that Inductor gets."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx

from attn_compiler.context_parallel import overlap as torch_overlap
from attn_compiler.context_parallel.collectives import MOVES
from tests.passes.context_parallel import traced
from tests.passes.context_parallel.traced import HEAD_DIM, HEADS_KV

LENGTH = 24
#: numbers of a rank's keys and values
PIECE = LENGTH * HEADS_KV * 2 * HEAD_DIM
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def _last_read(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The last node that reads what a gather brings, through views."""
    last, queue = node, [node]
    while queue:
        for user in queue.pop().users:
            last = max(last, user)
            queue += [user] if user.target in MOVES else []
    return last


def _held(graph: fx.Graph, group: str) -> int:
    """How many ranks' keys and values are there at a time, at most."""
    spans = [(x, _last_read(graph, x)) for x in graph.nodes if torch_overlap.is_piece(x, group)]
    return max(sum(begin <= node <= end for begin, end in spans) for node in graph.nodes)


@pytest.fixture(scope="module", params=[(4, None, 1), (4, "head_tail", 1), (3, None, 2)], ids=str)
def run(request: pytest.FixtureRequest) -> tuple[list[fx.Graph], str, int, int]:
    size, order, layers = request.param
    with pytest.MonkeyPatch.context() as monkeypatch:
        found, group = traced.graphs(monkeypatch, size=size, length=LENGTH, load_balance=order, layers=layers)
    return found, group, size, layers


def test_no_rank_holds_more_than_two_others_keys_and_values(run: tuple[list[fx.Graph], str, int, int]) -> None:
    found, group, size, layers = run
    forward, backward = found
    for graph in found:
        pieces = [node for node in graph.nodes if torch_overlap.is_piece(node, group)]
        assert len(pieces) == size * layers
        assert all(node.meta["val"].numel() == PIECE for node in pieces)
        assert _held(graph, group) == 2
    kept = [x.meta["val"] for x in forward.output_node().args[0][1:] if isinstance(x.meta.get("val"), torch.Tensor)]  # type: ignore[index,union-attr]
    # Slices of all ranks' keys and values, which are as much as the rank's own: nothing as large as one rank's comes from others.
    slices = [x for x in kept if x.shape == (PIECE // size,)]
    assert len(slices) == size * layers
    # Of each attention q and the merged output, and no part's.
    assert sum(x.dim() == 4 for x in kept) == 2 * layers
    assert backward.find_nodes(op="call_function", target=torch.ops._c10d_functional.reduce_scatter_tensor.default)


def test_each_gather_begins_before_the_step_before_it(run: tuple[list[fx.Graph], str, int, int]) -> None:
    found, group, size, _ = run
    for graph in found:
        pieces = [node for node in graph.nodes if torch_overlap.is_piece(node, group)]
        attentions = [node for node in graph.nodes if "attn_compiler.triton_" in str(node.target)]
        each = len(attentions) // len(pieces)
        for step, (before, gather) in enumerate(itertools.pairwise(pieces)):
            is_next_layer = graph is found[0] and (step + 1) % size == 0
            if not is_next_layer:
                assert before < gather < attentions[step * each]
        for step, gather in enumerate(pieces):
            (wait,) = (user for user in gather.users if user.target is _WAIT)
            assert wait < attentions[step * each]
            assert step == 0 or attentions[step * each - 1] < wait


def test_collectives_are_those_that_the_guide_counts(run: tuple[list[fx.Graph], str, int, int]) -> None:
    found, _, size, layers = run
    ops = torch.ops._c10d_functional
    counts = [
        [
            len(graph.find_nodes(op="call_function", target=op.default))
            for op in (ops.all_to_all_single, ops.all_gather_into_tensor, ops.reduce_scatter_tensor)
        ]
        for graph in found
    ]
    assert counts == [[layers, layers * size, 0], [layers, layers * size, layers * size]]


def test_other_methods_gathers_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found, group = traced.graphs(monkeypatch, size=2, length=LENGTH, method="all_gather")
    assert not any(torch_overlap.is_piece(node, group) for graph in found for node in graph.nodes)


def test_a_gather_of_what_is_computed_stays_where_it_is() -> None:
    graph = fx.Graph()
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)

    def call(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = torch.empty(4)
        return node

    first = call(gather, x, 2, "g")
    wait = call(_WAIT, first)
    made = call(torch.ops.aten.sin.default, wait)
    second = call(gather, made, 2, "g")
    graph.output(call(_WAIT, second))
    torch_overlap.move_exchanges(graph, "g")
    assert list(graph.nodes)[:5] == [x, first, wait, made, second]
