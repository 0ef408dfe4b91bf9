"""Lists of tiles against a search through every pair of every tile."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from attn_compiler.lowerings.base import Emitter, Tile, Tiles
from attn_compiler.lowerings.shared import expression_nodes
from attn_compiler.lowerings.shared import tiles as tile_lists
from attn_compiler.lowerings.shared.kernel_plan import Band, Plan
from attn_compiler.lowerings.shared.tiles import Masking
from tests.lowerings import plan_math
from tests.lowerings.bench import Bench

CPU = torch.device("cpu")


def tiles_of(forward: tuple[int, int], grad_kv: tuple[int, int]) -> Tiles:
    first, second = (Tile(queries=q, keys=k, warps=4, stages=1) for q, k in (forward, grad_kv))
    return Tiles(forward=first, grad_q=first, grad_kv=second)


SQUARE = tiles_of((32, 32), (32, 32))
UNEQUAL = tiles_of((128, 64), (64, 128))


def longest_run(states: list[str]) -> list[int]:
    """The first of the longest runs of blocks that are allowed in full."""
    runs: list[list[int]] = [[]]
    for m, state in enumerate(states):
        if state == "full":
            runs[-1].append(m)
        else:
            runs.append([])
    return max(runs, key=len)


def sought(allowed: torch.Tensor, tile: Tile, *, by_key: bool) -> list[list[list[tuple[list[int], list[int]]]]]:
    """For each batch row, head and block: the blocks of the other side that need the mask, and the run of those that don't."""
    seqlen_q, seqlen_kv = allowed.shape[2:]
    count_q, count_k = -(-seqlen_q // tile.queries), -(-seqlen_kv // tile.keys)

    def state(b: int, h: int, i: int, j: int) -> str:
        block = allowed[b, h, i * tile.queries : (i + 1) * tile.queries, j * tile.keys : (j + 1) * tile.keys]
        whole = (j + 1) * tile.keys <= seqlen_kv
        return "full" if bool(block.all()) and whole else "partial" if bool(block.any()) else "none"

    def blocks(b: int, h: int, n: int) -> tuple[list[int], list[int]]:
        pairs = [(i, n) for i in range(count_q)] if by_key else [(n, j) for j in range(count_k)]
        states = [state(b, h, i, j) for i, j in pairs]
        run = longest_run(states)
        return [m for m, s in enumerate(states) if s != "none" and m not in run], run

    count = count_k if by_key else count_q
    return [[[blocks(b, h, n) for n in range(count)] for h in range(allowed.shape[1])] for b in range(allowed.shape[0])]


def read(listed: torch.Tensor, count: int) -> list[list[list[tuple[list[int], list[int]]]]]:
    """The same out of the lists. What is left of them, for blocks that there are not, must be empty."""
    assert listed.dtype == torch.int32
    assert listed.is_contiguous()
    assert not listed[:, :, count:, 0].any()
    assert torch.equal(listed[:, :, count:, 1], listed[:, :, count:, 2])

    def blocks(row: list[int]) -> tuple[list[int], list[int]]:
        count, first, end = row[:3]
        return row[3 : 3 + count], list(range(first, end))

    return [[[blocks(row) for row in head[:count]] for head in batch] for batch in listed.tolist()]


def operands(seqlen_q: int, seqlen_kv: int, names: tuple[str, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ones, with blocks of all three states."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    first = numbers(seqlen_kv, 2, seqlen_q)
    made = {
        "rows": torch.stack([first // 2, torch.minimum(first + 40, torch.tensor(seqlen_kv))]).int(),
        "keys": numbers(6, 2, 1 + seqlen_kv // 32).repeat_interleave(32, 1)[:, :seqlen_kv].contiguous() > 0,
        "documents_q": (torch.arange(seqlen_q) // 50)[None].int(),
        "documents_k": (torch.arange(seqlen_kv) // 50)[None].repeat(2, 1).int(),
        "mask": numbers(40, 1, 3, seqlen_q, seqlen_kv) > 0,
    }
    made["keys"][:, 0] = True
    return {name: made[name] for name in names}


PARTS = (("rows",), ("keys",), ("documents_q", "documents_k"), ("mask",))
SIZES = st.integers(1, 300)


def listing(
    bench: Bench, names: Mapping[str, torch.Tensor], band: Band | None, tiles: Tiles, *, by_key: bool
) -> fx.Node:
    def emit(emitter: Emitter) -> fx.Node:
        documents = (bench.nodes["documents_q"], bench.nodes["documents_k"]) if "documents_q" in names else None
        masking = Masking(
            device=CPU,
            seqlen_q=expression_nodes.size_of(emitter, bench.nodes["q"], 0),
            seqlen_kv=expression_nodes.size_of(emitter, bench.nodes["k"], 0),
            band=band,
            documents=documents,
            **{name: bench.nodes[name] for name in names if not name.startswith("documents")},
        )
        return tile_lists.lists(emitter, masking, tiles, by_key=by_key)

    node: fx.Node = bench.call(emit)
    return node


def check(
    listed: torch.Tensor, have: dict[str, torch.Tensor], band: Band | None, sizes: tuple[int, int], tile: Tile, by_key: bool
) -> None:  # fmt: skip
    plan = Plan(band=band, documents="documents_q" in have, **{n: True for n in have if not n.startswith("documents")})
    allowed = plan_math.allowed(plan, have, *sizes)
    count = -(-sizes[by_key] // (tile.keys if by_key else tile.queries))
    assert read(listed, count) == sought(allowed, tile, by_key=by_key)


@settings(deadline=None, max_examples=40)
@given(
    SIZES,
    SIZES,
    st.lists(st.sampled_from(PARTS), min_size=1, unique=True),
    st.sampled_from([None, Band(right=0), Band(left=40, right=3), Band(right=0, left=90, from_end=True)]),
    st.sampled_from([SQUARE, UNEQUAL, tiles_of((64, 128), (96, 32))]),
    st.booleans(),
)
def test_lists_are_those_of_a_search(
    seqlen_q: int, seqlen_kv: int, chosen: list[tuple[str, ...]], band: Band | None, tiles: Tiles, by_key: bool
) -> None:
    have = operands(seqlen_q, seqlen_kv, tuple(itertools.chain(*chosen)))
    bench = Bench(q=torch.empty(seqlen_q), k=torch.empty(seqlen_kv), **have)
    (listed,) = bench.run([listing(bench, have, band, tiles, by_key=by_key)])
    tile = tiles.grad_kv if by_key else tiles.forward
    count_q, count_k = -(-seqlen_q // tile.queries), -(-seqlen_kv // tile.keys)
    assert listed.shape[2:] == ((count_k, count_q + 3) if by_key else (count_q, count_k + 3))
    check(listed, have, band, (seqlen_q, seqlen_kv), tile, by_key)


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
    bench = Bench(dynamic, q=torch.empty(70), k=torch.empty(150), **operands(70, 150, names))
    node = listing(bench, operands(70, 150, names), Band(right=0, from_end=True), UNEQUAL, by_key=by_key)
    assert not bench.env.guards
    for sizes in ((1, 1), (2, 300), (64, 128), (300, 33)):
        have = operands(*sizes, names, seed=1)
        (listed,) = bench.run([node], q=torch.empty(sizes[0]), k=torch.empty(sizes[1]), **have)
        check(listed, have, Band(right=0, from_end=True), sizes, UNEQUAL.grad_kv if by_key else UNEQUAL.forward, by_key)


def test_equal_masks_share_their_lists_and_their_states() -> None:
    have = operands(70, 150, ("keys",))
    bench = Bench(q=torch.empty(70), k=torch.empty(150), other=torch.empty(90), **have)
    first = listing(bench, have, None, UNEQUAL, by_key=False)
    before = len(bench.graph.nodes)
    assert listing(bench, have, None, UNEQUAL, by_key=False) is first
    assert len(bench.graph.nodes) == before
    by_key = listing(bench, have, None, UNEQUAL, by_key=True)
    evaluated = [n for n in bench.graph.nodes if n.target is torch.any and n.meta["example_value"].dim() == 4]
    assert len(evaluated) == 2 + 2 + 2
    assert by_key is not first
    # Fewer queries, and another band, are another mask of the same keys.
    bench.nodes["q"] = bench.nodes["other"]
    assert listing(bench, have, None, UNEQUAL, by_key=False) is not first
    assert listing(bench, have, Band(right=0), UNEQUAL, by_key=False) is not first


def test_lists_need_no_tensor_of_all_pairs_but_what_is_reduced() -> None:
    """Every tensor as large as the scores is read by elementwise nodes and reductions alone, which Inductor fuses."""
    have = operands(300, 300, ("keys", "rows"))
    bench = Bench(q=torch.empty(300), k=torch.empty(300), **have)
    listing(bench, have, Band(right=0), UNEQUAL, by_key=True)
    large = [n for n in bench.graph.nodes if isinstance(n.meta["example_value"], torch.Tensor)]
    large = [n for n in large if n.meta["example_value"].numel() >= 300 * 300]
    assert large
    fused = {torch.logical_and, torch.logical_not, torch.any}
    assert {user.target for n in large for user in n.users} <= fused
