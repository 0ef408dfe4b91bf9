"""Lists of tiles as nodes: what they hold for other sizes than those that the graph was made for, and what is shared."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import fx

from attn_compiler.index_expr import on_nodes
from attn_compiler.lowerings.base import Emitter, Tile, Tiles
from attn_compiler.lowerings.shared.parts import tiles as tile_lists
from attn_compiler.lowerings.shared.parts.kernel_plan import Band
from attn_compiler.lowerings.shared.parts.tiles import Masking
from tests.lowerings.bench import Bench
from tests.lowerings.shared.searched_tiles import Mask, read, searched, tensors

CPU = torch.device("cpu")


def tiles_of(forward: tuple[int, int], grad_kv: tuple[int, int]) -> Tiles:
    first, second = (Tile(queries=q, keys=k, warps=4, stages=1) for q, k in (forward, grad_kv))
    return Tiles(forward=first, grad_q=first, grad_kv=second)


UNEQUAL = tiles_of((128, 64), (64, 128))
PARTS = (("rows",), ("keys",), ("documents_q", "documents_k"), ("mask",), ("keys", "mask"))
BAND = Band(right=0, from_end=True)


def listing(
    bench: Bench, names: Mapping[str, torch.Tensor], band: Band | None, tiles: Tiles, *, by_key: bool
) -> fx.Node:
    def emit(emitter: Emitter) -> fx.Node:
        documents = (bench.nodes["documents_q"], bench.nodes["documents_k"]) if "documents_q" in names else None
        masking = Masking(
            device=CPU,
            seqlen_q=on_nodes.size_of(emitter, bench.nodes["q"], 0),
            seqlen_kv=on_nodes.size_of(emitter, bench.nodes["k"], 0),
            band=band,
            documents=documents,
            **{name: bench.nodes[name] for name in names if not name.startswith("documents")},
        )
        return tile_lists.lists(emitter, masking, tiles, by_key=by_key)

    node: fx.Node = bench.call(emit)
    return node


@pytest.mark.parametrize("names", PARTS)
@pytest.mark.parametrize("by_key", [False, True])
def test_lists_of_fixed_sizes(names: tuple[str, ...], by_key: bool) -> None:
    for sizes in ((70, 150), (300, 33), (1, 1)):
        have = tensors(*sizes, names)
        bench = Bench(q=torch.empty(sizes[0]), k=torch.empty(sizes[1]), **have)
        (listed,) = bench.run([listing(bench, have, BAND, UNEQUAL, by_key=by_key)])
        mask = Mask(seqlen_q=sizes[0], seqlen_kv=sizes[1], band=BAND, have=have)
        tile = UNEQUAL.grad_kv if by_key else UNEQUAL.forward
        assert read(listed) == searched(mask, (tile.queries, tile.keys), by_key=by_key)


@pytest.mark.in_turns
@pytest.mark.parametrize("names", PARTS)
@pytest.mark.parametrize("by_key", [False, True])
def test_one_graph_for_every_length(names: tuple[str, ...], by_key: bool) -> None:
    dynamic = {
        "q": (0,),
        "k": (0,),
        "rows": (2,),
        "keys": (1,),
        "documents_q": (1,),
        "documents_k": (1,),
        "mask": (2, 3),
    }
    bench = Bench(dynamic, q=torch.empty(70), k=torch.empty(150), **tensors(70, 150, names))
    node = listing(bench, tensors(70, 150, names), BAND, UNEQUAL, by_key=by_key)
    assert not bench.env.guards
    tile = UNEQUAL.grad_kv if by_key else UNEQUAL.forward
    for sizes in ((1, 1), (2, 300), (64, 128), (300, 33)):
        have = tensors(*sizes, names, seed=1)
        (listed,) = bench.run([node], q=torch.empty(sizes[0]), k=torch.empty(sizes[1]), **have)
        mask = Mask(seqlen_q=sizes[0], seqlen_kv=sizes[1], band=BAND, have=have)
        assert read(listed) == searched(mask, (tile.queries, tile.keys), by_key=by_key)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(
    "band",
    [Band(left=1 - 2**31), Band(left=-(2**31), from_end=True), Band(right=-(2**31)), Band(left=2**40), Band(right=-(2**40))],
)  # fmt: skip
def test_bands_that_are_further_away_than_any_position(band: Band, by_key: bool) -> None:
    """The kernel adds positions to them in 32 bits."""
    launch = pytest.importorskip("attn_compiler.lowerings.shared.calls.listing_launch")
    have = tensors(300, 310, ("keys",))
    bench = Bench(q=torch.empty(300), k=torch.empty(310), **have)
    node = listing(bench, have, band, UNEQUAL, by_key=by_key)
    mask = Mask(seqlen_q=300, seqlen_kv=310, band=band, have=have)
    tile = UNEQUAL.grad_kv if by_key else UNEQUAL.forward
    found = launch.lists(*(have[x.name] if isinstance(x, fx.Node) else x for x in node.args))
    assert read(found) == searched(mask, (tile.queries, tile.keys), by_key=by_key)


def test_equal_masks_share_their_lists() -> None:
    have = tensors(70, 150, ("keys",))
    bench = Bench(q=torch.empty(70), k=torch.empty(150), other=torch.empty(90), **have)
    first = listing(bench, have, None, UNEQUAL, by_key=False)
    before = len(bench.graph.nodes)
    assert listing(bench, have, None, UNEQUAL, by_key=False) is first
    assert len(bench.graph.nodes) == before
    assert listing(bench, have, None, UNEQUAL, by_key=True) is not first
    # Fewer queries, and another band, are another mask of the same keys.
    bench.nodes["q"] = bench.nodes["other"]
    assert listing(bench, have, None, UNEQUAL, by_key=False) is not first
    assert listing(bench, have, Band(right=0), UNEQUAL, by_key=False) is not first


def test_lists_of_one_dense_mask_share_what_its_pairs_hold() -> None:
    have = tensors(70, 150, ("mask",))
    bench = Bench(q=torch.empty(70), k=torch.empty(150), **have)
    for tiles in (UNEQUAL, tiles_of((64, 64), (64, 64))):
        for by_key in (False, True):
            listing(bench, have, None, tiles, by_key=by_key)
    targets = [n.target for n in bench.graph.nodes]
    assert targets.count(torch.any) == 2
    assert targets.count(torch.ops.attn_compiler.tile_lists.default) == 4


def test_no_pair_is_looked_at_without_a_dense_mask() -> None:
    """One node makes a list of whatever else masks."""
    have = tensors(300, 300, ("keys", "rows", "documents_q", "documents_k"))
    bench = Bench(q=torch.empty(300), k=torch.empty(300), **have)
    before = len(bench.graph.nodes)
    listing(bench, have, Band(right=0), UNEQUAL, by_key=True)
    assert len(bench.graph.nodes) == before + 1


def test_pairs_of_a_dense_mask_are_read_by_what_is_reduced_alone() -> None:
    """Inductor fuses elementwise nodes into reductions, so no tensor of all pairs is made."""
    have = tensors(300, 300, ("mask",))
    bench = Bench(q=torch.empty(300), k=torch.empty(300), **have)
    listing(bench, have, Band(right=0), UNEQUAL, by_key=True)
    nodes = [n for n in bench.graph.nodes if n.op == "call_function"]
    large = [n for n in nodes if isinstance(n.meta["example_value"], torch.Tensor)]
    large = [n for n in large if n.meta["example_value"].numel() >= 300 * 300]
    assert large
    assert {user.target for n in large for user in n.users} <= {torch.logical_not, torch.any}
