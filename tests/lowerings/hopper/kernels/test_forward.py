"""Parts of the forward for Hopper, run in PyTorch (gluon_in_torch.py)."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import types
from typing import Any

import pytest
import torch

from attn_compiler.lowerings.hopper.kernels import (
    forward_added_sm90,
    forward_fetching_sm90,
    forward_masks_sm90,
    forward_ring_sm90,
    forward_softmax_sm90,
    forward_turns_sm90,
    head_parts_sm90,
)
from attn_compiler.lowerings.hopper.plan import BLOCKS as TURNS_BLOCKS, THREE
from tests.lowerings.shared.kernels import gluon_in_torch
from tests.lowerings.shared.kernels.gluon_in_torch import Pointer, Shared
from tests.lowerings.shared.kernels.proxies import Unfenced

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

# Who brings what is added to the scores, and who reads it, run in PyTorch (gluon_in_torch.py).
BATCHES, HEADS, QUERIES, KEYS = 2, 3, 200, 256


def _how(*, stages: int, by_distance: bool = False) -> Any:
    return types.SimpleNamespace(ADDED_STAGES=stages, CONSUMERS=2, BLOCK_N=128, BY_DISTANCE=by_distance)


def _added(functions: dict[str, Any], bias: torch.Tensor, how: Any, zero: int = 0) -> Any:
    batches, heads, rows, columns = bias.shape
    adding = types.SimpleNamespace(
        batches=torch.tensor(batches), heads=torch.tensor(heads), rows=rows, columns=columns, zero=zero,
        **dict(zip(("stride_b", "stride_h", "stride_q"), bias.stride()[:3], strict=True)),
    )  # fmt: skip
    of = functions["descriptor_of_added"](Pointer(bias.view(-1)), adding, 64, how.BLOCK_N)
    tiles, full, empty = functions["room_for_added"](of, bias.dtype, how)
    return types.SimpleNamespace(of=of, at=adding, tiles=tiles, full=full, empty=empty)


def _brought(
    functions: dict[str, Any], added: Any, how: Any, *, head: int, start: int
) -> dict[int, list[torch.Tensor]]:
    """Of each warpgroup its tiles of a block, fetched while they are read."""
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def read(consumer: int) -> None:
        for n in range(KEYS // 128):
            found[consumer].append(functions["added_of"](consumer, n, added, None, how))
            functions["let_go_of_added"](consumer, n, added, how)

    readers = [threading.Thread(target=read, args=(consumer,)) for consumer in found]
    for reader in readers:
        reader.start()
    for n in range(KEYS // 128):
        functions["fetch_added"](torch.tensor(1), torch.tensor(head), torch.tensor(start), n * 128, n, added, how)
    for reader in readers:
        reader.join()
    return found


@pytest.fixture
def functions() -> dict[str, Any]:
    return gluon_in_torch.scope(forward_added_sm90, (0,), (1,))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("shape", [(BATCHES, HEADS), (1, HEADS), (BATCHES, 1), (1, 1)])
def test_each_warpgroup_gets_its_queries_of_a_bias(
    shape: tuple[int, int], stages: int, functions: dict[str, Any]
) -> None:
    bias = torch.randn(*shape, QUERIES, KEYS)
    how = _how(stages=stages)
    found = _brought(functions, _added(functions, bias, how), how, head=2, start=128)
    of_head = bias[min(1, shape[0] - 1), min(2, shape[1] - 1)]
    assert torch.equal(torch.cat(found[0], 1), of_head[128:192])
    # Beyond the last query it is 0.
    assert torch.equal(torch.cat(found[1], 1)[:8], of_head[192:])
    assert not torch.cat(found[1], 1)[8:].any()


def test_a_tile_by_distance_begins_at_its_first_key_and_query(functions: dict[str, Any]) -> None:
    columns = torch.arange(640.0).expand(1, 1, 64, 640).contiguous()
    how = _how(stages=1, by_distance=True)
    found = _brought(functions, _added(functions, columns, how, zero=320), how, head=0, start=128)
    for consumer, tiles in found.items():
        for n, tile in enumerate(tiles):
            assert float(tile[0, 0]) == n * 128 - (128 + 64 * consumer) + 320


@pytest.mark.parametrize("fenced", [True, False])
def test_a_tile_is_let_go_of_behind_a_fence(
    fenced: bool, functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Barriers order threads, not the copy engine."""
    if not fenced:
        monkeypatch.setitem(functions, "fence_async_shared", lambda: None)
    how = _how(stages=1)
    added = _added(functions, torch.randn(1, 1, QUERIES, KEYS), how)

    def fetch(n: int) -> None:
        functions["fetch_added"](torch.tensor(0), torch.tensor(0), torch.tensor(0), n * 128, n, added, how)

    def read(consumer: int) -> None:
        functions["added_of"](consumer, 0, added, None, how)
        functions["let_go_of_added"](consumer, 0, added, how)

    fetch(0)
    readers = [threading.Thread(target=read, args=(each,)) for each in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    with contextlib.nullcontext() if fenced else pytest.raises(Unfenced):
        fetch(1)


# Which blocks the warpgroups of the forward share, and where they find them, run in PyTorch (gluon_in_torch.py).
FETCHING_HEADS, BATCH, BLOCKS = 3, 2, 5


def scope(program: int = 0, programs: int = 1) -> dict[str, Any]:
    return gluon_in_torch.scope(forward_fetching_sm90, (program,), (programs,))


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("section", [1, 4, 6])
@pytest.mark.parametrize("programs", [1, 4, 30])
def test_every_block_of_every_head_is_some_programs(programs: int, section: int, batch_last: bool) -> None:
    how = types.SimpleNamespace(ORDERED=False, BATCH_LAST=batch_last)
    work = types.SimpleNamespace(
        section=section,
        blocks=BLOCKS,
        heads_of_all=torch.tensor(FETCHING_HEADS * BATCH),
        sizes=types.SimpleNamespace(heads_q=FETCHING_HEADS),
    )
    taken, rounds = [], -(-BLOCKS * FETCHING_HEADS * BATCH // programs)
    for program in range(programs):
        for nth in range(rounds):
            is_one, block, batch, head, row = map(int, scope(program, programs)["nth_block"](nth, work, how))
            assert row == batch * FETCHING_HEADS + head
            if is_one:
                taken.append((batch, head, block))
    assert sorted(taken) == [(b, h, i) for b in range(BATCH) for h in range(FETCHING_HEADS) for i in range(BLOCKS)]
    if programs == section == 1:
        # Batch rows that share a bias follow each other.
        (first, _, _), (second, _, _) = taken[0], taken[BLOCKS]
        assert (first != second) is batch_last


@pytest.mark.parametrize(("consumers", "stages"), [(2, 1), (2, 2), (3, 1)])
def test_queries_do_not_meet_in_shared_memory(consumers: int, stages: int) -> None:
    """Each place alternates between two phases, and has one warpgroup's queries."""
    how = types.SimpleNamespace(CONSUMERS=consumers, QUERY_STAGES=stages)
    place_of_queries = scope()["place_of_queries"]
    seen: dict[int, list[tuple[int, int]]] = {}
    for nth in range(4 * stages):
        for consumer in range(consumers):
            place, phase = place_of_queries(consumer, nth, how)
            seen.setdefault(place, []).append((consumer, phase))
    assert sorted(seen) == list(range(consumers * stages))
    for found in seen.values():
        assert len({consumer for consumer, _ in found}) == 1
        assert [phase for _, phase in found] == [0, 1, 0, 1]


def test_a_block_whose_keys_are_all_masked_visits_one_tile() -> None:
    """What it computes is no number of its rows: there the lse says so."""
    sizes = types.SimpleNamespace(seqlen_q=64, seqlen_kv=300, band_left=0, band_right=torch.tensor(-100))
    how = types.SimpleNamespace(BLOCK_M=64, BLOCK_N=128, HAS_LEFT=False, HAS_RIGHT=True, MASK_ALL=False)
    partial, first, _, full_first, full_last = scope()["tiles_to_visit"](None, torch.tensor(0), sizes, how)
    assert (int(partial), int(first)) == (1, 0)
    assert int(full_first) == int(full_last)


# Which pairs of a tile are allowed, run in PyTorch (gluon_in_torch.py).
MASKS_QUERIES, MASKS_KEYS, WORDS = 64, 256, 16
NOTHING: dict[str, Any] = dict.fromkeys(("Rows", "Keys", "DocumentsQ", "DocumentsK", "Slopes", "Bits"))
HOW = types.SimpleNamespace(BLOCK_M=128, BLOCK_N=128, HAS_LEFT=False, HAS_RIGHT=False)


@pytest.fixture
def functions_masks() -> dict[str, Any]:
    return gluon_in_torch.scope(forward_masks_sm90, (0,), (1,))


def _own(**given: Any) -> Any:
    least, most = torch.zeros(MASKS_QUERIES, dtype=torch.int64), torch.full((MASKS_QUERIES,), MASKS_KEYS - 1)
    return types.SimpleNamespace(**{"least": least, "most": most, "document": None, "bits": None} | given)


@pytest.mark.parametrize("tile", [0, 1])
def test_bits_of_a_dense_mask(tile: int, functions_masks: dict[str, Any]) -> None:
    allowed = torch.rand(MASKS_QUERIES, MASKS_KEYS) < 0.5
    words = torch.zeros(MASKS_QUERIES, WORDS, dtype=torch.int64)
    for key in range(MASKS_KEYS):
        words[:, key // 32] |= allowed[:, key].long() << (key % 32)
    masks = types.SimpleNamespace(**NOTHING | {"Bits": Pointer(words.to(torch.int32).view(-1))})
    own = _own(bits=torch.arange(MASKS_QUERIES) * WORDS)
    found = functions_masks["masked"](torch.zeros(MASKS_QUERIES, 128), tile, own, masks, MASKS_KEYS, None, HOW)
    assert torch.equal(found == 0.0, allowed[:, tile * 128 :][:, :128])


def test_keys_from_the_first_to_the_last(functions_masks: dict[str, Any]) -> None:
    at = torch.arange(MASKS_QUERIES)
    masks = types.SimpleNamespace(**NOTHING)
    own = _own(least=at + 120, most=at + 140)
    how = types.SimpleNamespace(**vars(HOW) | {"HAS_LEFT": True})
    found = functions_masks["masked"](torch.zeros(MASKS_QUERIES, 128), 1, own, masks, MASKS_KEYS, None, how)
    keys = torch.arange(128, 256)
    assert torch.equal(found == 0.0, (keys >= at[:, None] + 120) & (keys <= at[:, None] + 140))


def test_queries_of_a_warpgroup_and_the_keys_of_their_band(functions_masks: dict[str, Any]) -> None:
    sizes = types.SimpleNamespace(seqlen_q=300, seqlen_kv=MASKS_KEYS, band_left=10, band_right=torch.tensor(5))
    how = types.SimpleNamespace(**vars(HOW) | {"HAS_LEFT": True, "HAS_RIGHT": True})
    masks = types.SimpleNamespace(**NOTHING)
    masking = types.SimpleNamespace(rows_b=0, rows_side=0)
    rows, least, most = functions_masks["keys_of"](
        1, torch.tensor(1), torch.tensor(0), masks, masking, sizes, None, how
    )
    assert torch.equal(rows, torch.arange(192, 256))
    assert torch.equal(least, rows - 10)
    assert torch.equal(most, (rows + 5).clamp(max=MASKS_KEYS - 1))


# Parts of tiles that have places in turn, run in PyTorch (gluon_in_torch.py).
RING_KEYS, PART, STAGES = 4, 8, 3


@pytest.fixture
def functions_ring() -> dict[str, Any]:
    return gluon_in_torch.scope(forward_ring_sm90, (0,), (1,))


@pytest.mark.parametrize(("head_dim", "passes"), [(128, 1), (256, 1), (264, 2), (512, 2)])
def test_passes(head_dim: int, passes: int, functions_ring: dict[str, Any]) -> None:
    assert functions_ring["passes_in"](head_dim, 256) == passes


def test_a_part_waits_until_what_was_in_its_place_is_let_go_of_by_all(functions_ring: dict[str, Any]) -> None:
    how = types.SimpleNamespace(STAGES=STAGES, TILE=RING_KEYS, PART=PART)
    barriers = functions_ring["barriers_of_ring"](2, STAGES, 2)
    ring = Shared(torch.arange(STAGES * RING_KEYS * PART).view(STAGES, 1, 1, RING_KEYS, PART).float())
    tiles = types.SimpleNamespace(k=ring)
    for n in range(3 * STAGES):
        place = barriers.full.index(n % STAGES)
        place.expect(0)
        part = functions_ring["part_at"](n, tiles, barriers, how)
        assert torch.equal(part.memory, ring.memory[n % STAGES, 0, 0])
        empty = barriers.empty.index(n % STAGES)
        for _ in range(2):
            assert empty.phase == n // STAGES
            functions_ring["let_go"](n, barriers, how)
        assert empty.phase == n // STAGES + 1


# The softmax of one tile after the other, run in PyTorch (gluon_in_torch.py).
ROWS, SOFTMAX_KEYS, TILES, SCALE = 64, 64, 3, 0.3
SOFTMAX_HOW = types.SimpleNamespace(BLOCK_N=SOFTMAX_KEYS, SOFTCAP=False, HAS_LEFT=False, LOW_AGAIN=False)


@pytest.mark.parametrize("sink", [None, 1.5])
def test_tiles_one_after_the_other(sink: float | None) -> None:
    functions = gluon_in_torch.scope(forward_softmax_sm90, (0,), (1,))
    qk = 4 * torch.randn(ROWS, TILES * SOFTMAX_KEYS, generator=torch.Generator().manual_seed(0))
    most = torch.arange(ROWS) + 90
    most[3] = -1
    own = types.SimpleNamespace(factor=SCALE / math.log(2), slope=None, most=most, document=None, bits=None)
    masks = types.SimpleNamespace(**NOTHING)
    peak, total, out = torch.full((ROWS,), -1e30), torch.zeros(ROWS, 4), torch.zeros(ROWS, TILES * SOFTMAX_KEYS)
    for tile in range(TILES):
        part = slice(tile * SOFTMAX_KEYS, (tile + 1) * SOFTMAX_KEYS)
        weights, peak, total, decay = functions["softmax"](
            qk[:, part], None, tile, peak, total, own, masks, TILES * SOFTMAX_KEYS, True, None, SOFTMAX_HOW
        )
        out = out * decay[:, None]
        out[:, part] = weights
    Sinks = None if sink is None else Pointer(torch.tensor([0.0, sink]))
    scale, lse, is_empty = functions["divided"](peak, total, Sinks, torch.tensor(1), None, SOFTMAX_HOW)
    scores = torch.where(torch.arange(TILES * SOFTMAX_KEYS) <= most[:, None], qk * SCALE, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, torch.full((ROWS, 1), sink)], 1)
    assert is_empty.tolist() == [row == 3 for row in range(ROWS)]
    right = scores.softmax(1).nan_to_num(0)[:, : TILES * SOFTMAX_KEYS]
    torch.testing.assert_close(out * scale[:, None], right, atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, scores.logsumexp(1), atol=1e-5, rtol=0)


# Turns at the tensor cores.
@pytest.mark.parametrize("blocks", [TURNS_BLOCKS[64], THREE])
def test_turns(blocks: Any) -> None:
    said: list[str] = []
    functions = gluon_in_torch.scope(forward_turns_sm90, (0,), (1,))
    functions["gl"].inline_asm_elementwise = lambda asm, *args, **given: said.append(asm.split(";")[0])
    how = type("How", (), {"TURNS": blocks.takes_turns})
    for consumer in range(2):
        functions["await_products"](consumer, how)
        functions["give_products"](consumer, how)
    turns = ["bar.sync 14, 256", "bar.arrive 15, 256", "bar.sync 15, 256", "bar.arrive 14, 256"]
    assert said == (turns if blocks.consumers == 2 else [])


# A head dim as a sum of powers of two.
SUMS = [(64, [64]), (80, [64, 16]), (96, [64, 32]), (112, [64, 32, 16]), (128, [128]), (192, [128, 64])]


def scope_of_parts() -> dict[str, Any]:
    return gluon_in_torch.scope(head_parts_sm90, (0,), (1,))


@pytest.mark.parametrize(("head_dim", "widths"), SUMS)
def test_parts_follow_each_other_wide_ones_first(head_dim: int, widths: list[int]) -> None:
    functions = scope_of_parts()
    numbers = range(functions["parts_in"](head_dim))
    assert [functions["width_of"](head_dim, n) for n in numbers] == widths
    starts = list(itertools.accumulate(widths, initial=0))
    assert [functions["start_of"](head_dim, n) for n in numbers] == starts[:-1]
    assert starts[-1] == head_dim


def _shared(x: torch.Tensor, widths: list[int]) -> tuple[Any, ...]:
    """Parts of a tile of (positions, dims), as they lie in shared memory."""
    return tuple(gluon_in_torch.Shared(part) for part in x.split(widths, dim=1))


@pytest.mark.parametrize(("head_dim", "widths"), SUMS)
def test_products_of_the_parts_are_those_of_the_whole(head_dim: int, widths: list[int]) -> None:
    functions, generator = scope_of_parts(), torch.Generator().manual_seed(0)
    q, k = (torch.randn(64, head_dim, generator=generator) for _ in range(2))
    # What was in their place does not count.
    before = torch.full((64, 64), torch.nan)
    scores = functions["scores_of"](_shared(q, widths), _shared(k, widths), before, head_dim)
    torch.testing.assert_close(scores, q @ k.T, rtol=1e-4, atol=1e-4)
    out = functions["outputs_of"](scores, _shared(k, widths), functions["no_outputs"](head_dim), head_dim)
    assert [part.shape[1] for part in out] == widths
    torch.testing.assert_close(torch.cat(out, 1), scores @ k, rtol=1e-4, atol=1e-3)
    factor = torch.arange(64.0)
    scaled = torch.cat(functions["times"](out, factor, head_dim), 1)
    torch.testing.assert_close(scaled, factor[:, None] * torch.cat(out, 1))
    torch.testing.assert_close(
        functions["sums_of"](out, None, head_dim), torch.cat(out, 1).sum(1), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize(("head_dim", "widths"), SUMS)
def test_rows_without_keys_are_zero_whatever_is_there(head_dim: int, widths: list[int]) -> None:
    out = tuple(torch.full((64, width), torch.nan) for width in widths)
    is_empty = torch.arange(64) % 3 == 0
    found = torch.cat(scope_of_parts()["zero_where"](is_empty, out, head_dim), 1)
    assert (found[is_empty] == 0).all()
    assert found[~is_empty].isnan().all()
